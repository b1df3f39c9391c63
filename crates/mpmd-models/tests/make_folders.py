"""Makes the folders of small random models under `folders/`, with the results of `transformers`.

    python3 tests/make_folders.py [NAME...]             makes all folders again, or these
    python3 tests/make_folders.py --compare A B [TOL]   compares the weights of two folders
    python3 tests/make_folders.py --score DIR FILE N    nats per token of the first N tokens

Run it in `crates/mpmd-models/`, with `torch`, `transformers`, `tokenizers` and `safetensors` installed. The
results depend on the seeds below and on the versions, which `expected.json` names.
"""

import json
import sys
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).parent / "folders"
TEXT = HERE / "text.txt"
VOCABULARY = 320
# Tokens of the sequence with known logits, and of the scored beginnings of the text.
SHORT = 24
SCORED = [2, 200, 700]
# Tokens of the prompt, and of its greedy continuation with a margin at every step.
PROMPT, NEW, MARGIN = 12, 64, 1e-3
# Shape of the training: steps, microbatches, rows, tokens.
STEPS, MICROBATCHES, ROWS, TIME = 20, 2, 2, 16
RATE, DECAY = 3e-3, 0.1
# Steps and factor of the training with the loss that balances experts.
BALANCED, BALANCE = 10, 0.5
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
# Sizes of the folders of other families: odd numbers of heads, heads wider or narrower than their
# share of the width, rows of the embedding that no token has.
ODD = dict(
    COMMON,
    vocab_size=VOCABULARY + 3,
    hidden_size=20,
    intermediate_size=28,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=10,
    pad_token_id=None,
)
GEMMA = dict(
    ODD,
    hidden_size=18,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=12,
    sliding_window=10,
)
GPT2 = dict(
    vocab_size=VOCABULARY,
    n_positions=704,
    n_embd=15,
    n_layer=4,
    n_head=3,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=1,
)
PHI3 = dict(ODD, hidden_size=24, head_dim=None)
NEOX = dict(
    COMMON,
    vocab_size=VOCABULARY + 3,
    hidden_size=18,
    intermediate_size=28,
    num_attention_heads=3,
    rms_norm_eps=None,
    layer_norm_eps=1e-5,
)
STABLELM = dict(
    ODD,
    family="stablelm",
    hidden_size=24,
    head_dim=None,
    rms_norm_eps=None,
    layer_norm_eps=1e-4,
)
MOE = dict(ODD, hidden_size=16, intermediate_size=12, head_dim=6, num_experts_per_tok=2)
# A folder's place is its seed. `family` is llama unless it is set.
FOLDERS = {
    "bf16": dict(num_key_value_heads=1),
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
    "plain": dict(),
    "dynamic": dict(
        hidden_size=18,
        intermediate_size=28,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=20,
        rope_parameters=dict(rope_type="dynamic", rope_theta=400.0, factor=40.0),
    ),
    "qwen2": dict(
        ODD,
        family="qwen2",
        head_dim=None,
        use_sliding_window=False,
        sliding_window=8,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=3000.0,
            factor=4.0,
            original_max_position_embeddings=256,
            beta_fast=16.0,
        ),
    ),
    "qwen2-window": dict(
        ODD,
        family="qwen2",
        head_dim=None,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        hidden_size=24,
        num_attention_heads=4,
        num_hidden_layers=5,
        tie_word_embeddings=True,
    ),
    "qwen3": dict(ODD, family="qwen3"),
    "qwen3-window": dict(
        ODD,
        family="qwen3",
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
    ),
    "mistral": dict(ODD, family="mistral", sliding_window=12),
    "mistral-bf16": dict(
        ODD,
        family="mistral",
        num_attention_heads=4,
        sliding_window=None,
        tie_word_embeddings=True,
    ),
    "gemma3": dict(
        GEMMA,
        family="gemma3_text",
        num_hidden_layers=5,
        layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=2000.0, factor=4.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
    "gemma3-old": dict(
        GEMMA,
        family="gemma3_text",
        hidden_size=20,
        head_dim=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        final_logit_softcapping=4.0,
    ),
    "gpt2": dict(GPT2, family="gpt2"),
    "gpt2-hub": dict(
        GPT2,
        family="gpt2",
        n_embd=16,
        n_head=4,
        n_inner=22,
        scale_attn_by_inverse_layer_idx=True,
        activation_function="gelu",
    ),
    "phi3": dict(
        PHI3,
        family="phi3",
        original_max_position_embeddings=20,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=800.0,
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.5],
            long_factor=[1.2, 2.0, 7.5],
        ),
    ),
    "phi3-window": dict(
        PHI3,
        family="phi3",
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=11,
        tie_word_embeddings=True,
    ),
    "gemma2": dict(
        GEMMA, family="gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "gemma2-bf16": dict(
        GEMMA,
        family="gemma2",
        hidden_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "olmo2": dict(ODD, family="olmo2", head_dim=None),
    "olmo2-wide": dict(
        ODD,
        family="olmo2",
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "granite": dict(
        ODD,
        family="granite",
        embedding_multiplier=5.0,
        logits_scaling=1.5,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
    ),
    "granite-tied": dict(
        ODD,
        family="granite",
        num_attention_heads=4,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        embedding_multiplier=3,
    ),
    "neox": dict(NEOX, family="gpt_neox", hidden_act="gelu"),
    "neox-serial": dict(
        NEOX,
        family="gpt_neox",
        hidden_size=20,
        num_attention_heads=4,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=0.5),
    ),
    "mixtral": dict(
        MOE,
        family="mixtral",
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    ),
    "mixtral-window": dict(
        MOE,
        family="mixtral",
        num_key_value_heads=3,
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=8,
        tie_word_embeddings=True,
    ),
    "qwen3-moe": dict(
        MOE, family="qwen3_moe", num_experts=6, moe_intermediate_size=8, norm_topk_prob=True
    ),
    "qwen3-moe-sparse": dict(
        MOE,
        family="qwen3_moe",
        num_attention_heads=4,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        attention_bias=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        num_hidden_layers=6,
        tie_word_embeddings=True,
    ),
    "stablelm": dict(STABLELM, use_qkv_bias=True),
    "stablelm-parallel": dict(
        STABLELM,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_parallel_residual=True,
        qk_layernorm=True,
        tie_word_embeddings=True,
    ),
    "qwen2-moe": dict(
        MOE,
        family="qwen2_moe",
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=12,
        sliding_window=8,
    ),
    "qwen2-moe-sparse": dict(
        MOE,
        family="qwen2_moe",
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=9,
        qkv_bias=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=4,
        tie_word_embeddings=True,
    ),
}
# Folders whose weights are bf16.
HALF = ["bf16", "mistral-bf16", "gemma3-old", "gemma2-bf16"]
# Folders with several files, and the size of the largest.
SPLIT = {"grouped": "60KB", "mistral-bf16": "20KB", "gpt2-hub": "30KB", "phi3-window": "40KB"}
# The old form of the config: the settings of the rotary embedding are at the top.
OLD_FORM = {
    "bf16": dict(rope_theta=5000.0, rope_scaling=dict(type="linear", factor=2.0)),
    "gemma3-old": dict(
        rope_theta=3000.0,
        rope_local_base_freq=50.0,
        rope_scaling=dict(rope_type="linear", factor=2.0),
        sliding_window_pattern=3,
        layer_types=None,
    ),
    "phi3-window": dict(rope_theta=600.0, rope_scaling=None),
    "neox": dict(rotary_pct=0.25, rotary_emb_base=2000),
    "stablelm-parallel": dict(rope_theta=700.0, partial_rotary_factor=0.75),
}
# Parts of a fused projection's outputs that have matrices of LoRA of their own, by name.
FUSED = {
    "qkv_proj": lambda config, out: torch.arange(out).split(
        [n * (config.hidden_size // config.num_attention_heads)
         for n in (config.num_attention_heads,) + 2 * (config.num_key_value_heads,)]
    ),
    "gate_up_proj": lambda config, out: torch.arange(out).chunk(2),
    "c_attn": lambda config, out: torch.arange(out).chunk(3),
    "query_key_value": lambda config, out: [
        part.flatten()
        for part in torch.arange(out).reshape(config.num_attention_heads, 3, -1).unbind(1)
    ],
}


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


def make_weights(name, settings, attempt):
    """Makes the model in which all weights, also gains and biases, are random."""
    torch.manual_seed(list(FOLDERS).index(name) + 1000 * attempt)
    family = settings.pop("family", "llama")
    settings = {**COMMON, **settings} if family == "llama" else settings
    absent = [key for key in ("head_dim", "rms_norm_eps") if settings.get(key, 0) is None]
    config = AutoConfig.for_model(family, **{k: v for k, v in settings.items() if k not in absent})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            # The gains of gemma are what is added to 1.
            is_gain = ("norm" in path or "ln_" in path) and path.endswith("weight")
            mean = 1.0 if is_gain and not family.startswith("gemma") else 0.0
            weight.copy_(torch.randn_like(weight) * 0.15 + mean)
    return model


def forget(model):
    """Makes a model whose rotary embedding grows with the length forget longer sequences."""
    with torch.no_grad():
        model(torch.tensor([[0]]))


def greedy(model, tokens):
    """Returns the tokens that follow greedily, and the least margin between the first and the second.

    A sequence is padded to its final length, so that scalings by the length are those of the end.
    """
    ids, margins = list(tokens), []
    with torch.no_grad():
        for at in range(len(tokens), len(tokens) + NEW):
            padded = ids + [0] * (len(tokens) + NEW - at)
            best = model(torch.tensor([padded])).logits[0, at - 1].topk(2)
            margins.append((best.values[0] - best.values[1]).item())
            ids.append(best.indices[0].item())
    return ids[len(tokens) :], min(margins)


def nats_per_token(model, tokens):
    """Returns the mean cross-entropy of each token after the first, computed in double."""
    forget(model)
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()


class LoraLinear(torch.nn.Module):
    """A frozen linear layer, with a product of B and A beside each part of its outputs."""

    def __init__(self, base, inputs, parts):
        super().__init__()
        self.base, self.parts = base.requires_grad_(False), parts
        # Any values, as long as the test has the same.
        values = 0.5 * torch.cos(torch.arange(RANK * inputs, dtype=torch.float64))
        a = values.float().reshape(RANK, inputs)
        self.a = torch.nn.ParameterList(a.clone() for _ in parts)
        self.b = torch.nn.ParameterList(torch.zeros(len(part), RANK) for part in parts)

    def forward(self, x):
        y = self.base(x)
        for part, a, b in zip(self.parts, self.a, self.b):
            y = y.index_add(-1, part, FACTOR * (x @ a.T @ b.T))
        return y


def add_lora(model):
    """Freezes the model, and adds LoRA to all projections of its layers.

    A model with experts gets it in the attention alone.
    """
    model.requires_grad_(False)
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    has_experts = hasattr(model.config, "num_experts_per_tok")
    for module in list(layers.modules()):
        if has_experts and "Attention" not in type(module).__name__:
            continue
        for name, child in list(module.named_children()):
            if isinstance(child, (torch.nn.Linear, Conv1D)):
                shape = child.weight.shape
                inputs, outputs = shape if isinstance(child, Conv1D) else reversed(shape)
                parts = FUSED.get(name, lambda config, out: [torch.arange(out)])
                lora = LoraLinear(child, inputs, parts(model.config, outputs))
                setattr(module, name, lora)


def train(folder, tokens, lora=False, steps=STEPS, **config):
    """Trains in f32 on random windows of the tokens. Returns the windows and the losses.

    The loss that balances experts, if the config has it, is that of each microbatch.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config)
    if lora:
        add_lora(model)
    generator = torch.Generator().manual_seed(1)
    trained = [w for w in model.parameters() if w.requires_grad]
    matrices = [w for w in trained if w.dim() >= 2]
    vectors = [w for w in trained if w.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    windows, losses = [], []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - TIME, (MICROBATCHES, ROWS), generator=generator)
        rows = [[tokens[start : start + TIME + 1] for start in part] for part in starts.tolist()]
        batch = torch.tensor(rows).reshape(-1, TIME + 1)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if config:
            parts = batch[:, :-1].reshape(MICROBATCHES, ROWS, TIME)
            aux = torch.stack([model(part).aux_loss for part in parts]).mean()
            loss = loss + model.config.router_aux_loss_coef * aux
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        windows.append(rows)
        losses.append(loss.item())
    return windows, losses


def make_folder(name):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    tokenizer = train_tokenizer(folder)
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    for attempt in range(100):
        save_model(folder, name, make_weights(name, dict(FOLDERS[name]), attempt))
        in_f32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        continuation, margin = greedy(in_f32, tokens[:PROMPT])
        if margin >= MARGIN:
            break
    else:
        sys.exit(f"{name}: no model with such margins")

    model = AutoModelForCausalLM.from_pretrained(folder)
    forget(in_f32)
    with torch.no_grad():
        logits = in_f32(torch.tensor([tokens[:SHORT]])).logits[0]
    windows, losses = train(folder, tokens)
    _, lora_losses = train(folder, tokens, lora=True)
    balanced = dict(output_router_logits=True, router_aux_loss_coef=BALANCE, steps=BALANCED)
    has_experts = hasattr(model.config, "num_experts_per_tok")
    expected = dict(
        versions=dict(transformers=transformers.__version__, torch=torch.__version__),
        tokens=tokens[:SHORT],
        all_tokens=len(tokens),
        logits={str(at): logits[at].tolist() for at in (0, SHORT // 2, SHORT - 1)},
        nats={str(n): nats_per_token(model, tokens[:n]) for n in SCORED},
        nats_in_f32={str(n): nats_per_token(in_f32, tokens[:n]) for n in SCORED},
        prompt=tokens[:PROMPT],
        greedy=continuation,
        rate=RATE,
        decay=DECAY,
        losses=losses,
        lora_losses=lora_losses,
        balanced_losses=train(folder, tokens, **balanced)[1] if has_experts else [],
    )
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    (HERE / "windows.json").write_text(json.dumps(windows) + "\n")
    print(name, attempt, margin, expected["nats"], expected["nats_in_f32"], losses[0], losses[-1], lora_losses[-1])


def save_model(folder, name, model):
    if name in HALF:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SPLIT.get(name, "5GB"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if name in OLD_FORM:
        del config["rope_parameters"]
        config["torch_dtype"] = config.pop("dtype")
        for key, value in OLD_FORM[name].items():
            config[key] = value
            if value is None:
                del config[key]
        path.write_text(json.dumps(config, indent=2) + "\n")
    if name == "gpt2-hub":
        # As on the hub: names without prefix, and masks that nothing needs.
        index = folder / "model.safetensors.index.json"
        found = json.loads(index.read_text())
        names = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
            if "h.0.attn.c_attn.weight" in tensors:
                tensors["h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 8, 8))
            save_file(tensors, file, metadata=dict(format="pt"))
            names |= {n: file.name for n in tensors}
        index.write_text(json.dumps(dict(found, weight_map=names), indent=2) + "\n")


def compare(folders, tolerance):
    """Loads both folders, and fails unless all weights are equal up to the tolerance."""
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, (path, a[path].dtype, b[path].dtype)
        off = (a[path].double() - b[path].double()).abs().max().item()
        assert off <= tolerance, (path, off)
    print(f"{len(a)} weights are equal up to {tolerance}")


def write_defaults():
    """Writes the config that `transformers` makes without settings, for each family."""
    families = sorted({settings.get("family", "llama") for settings in FOLDERS.values()})
    configs = [json.loads(AutoConfig.for_model(name).to_json_string(False)) for name in families]
    (HERE / "defaults.json").write_text(json.dumps(configs) + "\n")


def main():
    match sys.argv[1:]:
        case ["--compare", a, b, *tolerance]:
            compare((a, b), float(tolerance[0]) if tolerance else 0.0)
        case ["--score", folder, file, count]:
            tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            ids = tokenizer.encode(Path(file).read_text(), add_special_tokens=False).ids
            model = AutoModelForCausalLM.from_pretrained(folder)
            print(nats_per_token(model, ids[: int(count)]))
        case names if all(name in FOLDERS for name in names):
            write_defaults()
            for name in names or FOLDERS:
                make_folder(name)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
