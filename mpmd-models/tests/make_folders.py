"""Makes the folders of small random models under `folders/`, with the results of `transformers`.

    python3 tests/make_folders.py                       makes all folders again
    python3 tests/make_folders.py --compare A B [TOL]   compares the weights of two folders
    python3 tests/make_folders.py --score DIR FILE N    nats per token of the first N tokens

Run it in `mpmd-models/`, with `torch`, `transformers`, `tokenizers` and `safetensors` installed. The
results depend on the seeds below and on the versions, which `expected.json` names.
"""

import json
import sys
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "folders"
TEXT = HERE / "text.txt"
VOCABULARY = 320
# Tokens of the sequence with known logits, and of the scored beginnings of the text.
SHORT = 24
SCORED = [2, 200, 700]
# Shape of the training: steps, microbatches, rows, tokens.
STEPS, MICROBATCHES, ROWS, TIME = 20, 2, 2, 16
RATE, DECAY = 3e-3, 0.1
# Rank of LoRA's matrices, and the factor of their product.
RANK, FACTOR = 2, 3.0

COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    bos_token_id=0,
    eos_token_id=1,
)
FOLDERS = {
    "plain": dict(),
    "grouped": dict(
        hidden_size=48,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "llama3": dict(
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "bf16": dict(num_key_value_heads=1),
}
# The old form of the config: the settings of the rotary embedding are at the top.
OLD_FORM = {"bf16": dict(rope_theta=5000.0, rope_scaling=dict(type="linear", factor=2.0))}


def train_tokenizer(folder):
    """Trains byte pairs on the text, and has a special token put before each sequence."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(TEXT)], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def make_weights(name, settings):
    """Makes the model in which all weights, also gains and biases, are random."""
    torch.manual_seed(sorted(FOLDERS).index(name))
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, **settings}))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            is_gain = "norm" in path
            weight.copy_(torch.randn_like(weight) * 0.15 + (1.0 if is_gain else 0.0))
    return model


def nats_per_token(model, tokens):
    """Returns the mean cross-entropy of each token after the first, computed in double."""
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()


class LoraLinear(torch.nn.Module):
    """A frozen linear layer beside the product of B and A."""

    def __init__(self, base):
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base = base.requires_grad_(False)
        # Any values, as long as the test has the same.
        values = 0.5 * torch.cos(torch.arange(RANK * inputs, dtype=torch.float64))
        self.a = torch.nn.Parameter(values.float().reshape(RANK, inputs))
        self.b = torch.nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x):
        return self.base(x) + FACTOR * (x @ self.a.T @ self.b.T)


def add_lora(model):
    """Freezes the model, and adds LoRA to all projections of its layers."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, torch.nn.Linear):
                    setattr(part, name, LoraLinear(module))


def train(folder, tokens, lora=False):
    """Trains in f32 on random windows of the tokens. Returns the windows and the losses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        add_lora(model)
    generator = torch.Generator().manual_seed(1)
    trained = [w for w in model.parameters() if w.requires_grad]
    matrices = [w for w in trained if w.dim() >= 2]
    vectors = [w for w in trained if w.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    windows, losses = [], []
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - TIME, (MICROBATCHES, ROWS), generator=generator)
        rows = [[tokens[start : start + TIME + 1] for start in part] for part in starts.tolist()]
        batch = torch.tensor(rows).reshape(-1, TIME + 1)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        windows.append(rows)
        losses.append(loss.item())
    return windows, losses


def make_folder(name, settings):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    model = make_weights(name, settings)
    if name in OLD_FORM:
        model = model.to(torch.bfloat16)
    shard = "60KB" if name == "grouped" else "5GB"
    model.save_pretrained(folder, max_shard_size=shard)
    if name in OLD_FORM:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"], config["dtype"]
        config.update(OLD_FORM[name], torch_dtype="bfloat16")
        path.write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = train_tokenizer(folder)
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids

    model = AutoModelForCausalLM.from_pretrained(folder)
    in_f32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = in_f32(torch.tensor([tokens[:SHORT]])).logits[0]
    windows, losses = train(folder, tokens)
    _, lora_losses = train(folder, tokens, lora=True)
    expected = dict(
        versions=dict(transformers=transformers.__version__, torch=torch.__version__),
        tokens=tokens[:SHORT],
        all_tokens=len(tokens),
        logits={str(at): logits[at].tolist() for at in (0, SHORT // 2, SHORT - 1)},
        nats={str(n): nats_per_token(model, tokens[:n]) for n in SCORED},
        nats_in_f32={str(n): nats_per_token(in_f32, tokens[:n]) for n in SCORED},
        rate=RATE,
        decay=DECAY,
        windows=windows,
        losses=losses,
        lora_losses=lora_losses,
    )
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    print(name, len(tokens), expected["nats"], expected["nats_in_f32"], losses[0], losses[-1], lora_losses[-1])


def compare(folders, tolerance):
    """Loads both folders, and fails unless all weights are equal up to the tolerance."""
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, (path, a[path].dtype, b[path].dtype)
        off = (a[path].double() - b[path].double()).abs().max().item()
        assert off <= tolerance, (path, off)
    print(f"{len(a)} weights are equal up to {tolerance}")


def main():
    match sys.argv[1:]:
        case []:
            for name, settings in FOLDERS.items():
                make_folder(name, settings)
        case ["--compare", a, b, *tolerance]:
            compare((a, b), float(tolerance[0]) if tolerance else 0.0)
        case ["--score", folder, file, count]:
            tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            ids = tokenizer.encode(Path(file).read_text(), add_special_tokens=False).ids
            model = AutoModelForCausalLM.from_pretrained(folder)
            print(nats_per_token(model, ids[: int(count)]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
