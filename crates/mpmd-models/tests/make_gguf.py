"""Makes the GGUF files under `gguf/` from the folders under `folders/`, by llama.cpp's converter.

    python3 tests/make_gguf.py LLAMA_CPP [NAME...]              makes all files again, or these
    python3 tests/make_gguf.py LLAMA_CPP --vocabularies TOKENS  compares tokens

The second form gives texts to the example `tokens`, whose program is `TOKENS`, with the
vocabularies that llama.cpp has in `models/`, and compares with the tokens that lie beside them.

Run it in `crates/mpmd-models/`, with `torch`, `transformers`, `sentencepiece` and `gguf` installed.
`LLAMA_CPP` is a checkout of llama.cpp, whose converter runs as it is but for these points:

- It knows a splitter of texts by a hash of a tokenizer's results. The small tokenizers are new to
  it, so it is told that they split as GPT-2 does.
- It takes Gemma's and Phi's tokenizers only as a file of SentencePiece. The small ones are BPE.
- It writes no `key_length` for Granite, whose heads have another width here.
- It drops the norms of StableLM's heads, since a generator returns another one.
- It reads `n_ctx` of GPT-2 and `rotary_pct` of GPT-NeoX, which new configs lack.
"""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = HERE / "folders"
GGUF = HERE / "gguf"
TEXT = FOLDERS / "text.txt"

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# Keys that the config of the folder at hand gets, beside its own.
CHANGES = {}
# Name of the file: (folder, output type, keys that the config gets).
FILES = {
    "plain-q8_0": ("plain", "q8_0", {}),
    "llama3-bf16": ("llama3", "bf16", {}),
    "mistral-f32": ("mistral", "f32", {}),
    "mixtral-f16": ("mixtral", "f16", {}),
    "qwen2-f16": ("qwen2", "f16", {}),
    "qwen2-moe-f16": ("qwen2-moe", "f16", {}),
    "qwen3-bf16": ("qwen3", "bf16", {}),
    "qwen3-moe-f16": ("qwen3-moe", "f16", {}),
    "gemma2-f16": ("gemma2", "f16", {}),
    "gemma3-f16": ("gemma3", "f16", {}),
    "phi3-f16": ("phi3", "f16", {}),
    "gpt2-f16": ("gpt2", "f16", {"n_ctx": 704}),
    "neox-f16": ("neox", "f16", {"rotary_pct": 0.25}),
    "stablelm-f16": ("stablelm", "f16", {}),
    "stablelm-parallel-f16": ("stablelm-parallel", "f16", {}),
    "granite-f16": ("granite", "f16", {}),
    "olmo2-f16": ("olmo2", "f16", {}),
}


def patched(llama_cpp):
    """Returns llama.cpp's converter, with the changes that the head of this file names."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import conversion.base as base
    import conversion.gemma as gemma
    import conversion.granite as granite
    import conversion.phi as phi
    import conversion.stablelm as stablelm

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    for family in (gemma.Gemma2Model, gemma.Gemma3Model, phi.Phi3MiniModel):
        family.set_vocab = base.TextModel._set_vocab_gpt2

    read = base.ModelBase.load_hparams
    base.ModelBase.load_hparams = staticmethod(lambda *a, **b: read(*a, **b) | CHANGES)
    keys = granite.GraniteModel.set_gguf_parameters

    def with_head_width(self):
        width = self.hparams["head_dim"]
        keys(self)
        self.gguf_writer.add_key_length(width)
        self.gguf_writer.add_value_length(width)
        self.gguf_writer.kv_data[0].pop("granite.rope.dimension_count")
        self.gguf_writer.add_rope_dimension_count(width)

    granite.GraniteModel.set_gguf_parameters = with_head_width

    change = stablelm.StableLMModel.modify_tensors

    def with_head_norms(self, *of):
        changed = change(self, *of)
        while True:
            try:
                yield next(changed)
            except StopIteration as end:
                yield from end.value or ()
                return

    stablelm.StableLMModel.modify_tensors = with_head_norms
    return base


def convert(base, folder, out_type, out, split=0):
    """Converts a folder into a GGUF file, or into several of at most `split` tensors each."""
    import gguf
    from conversion import get_model_class

    ftype = {
        "f32": gguf.LlamaFileType.ALL_F32,
        "f16": gguf.LlamaFileType.MOSTLY_F16,
        "bf16": gguf.LlamaFileType.MOSTLY_BF16,
        "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }[out_type]
    hparams = base.ModelBase.load_hparams(folder, False)
    family = get_model_class(hparams["architectures"][0])
    family(folder, ftype, out, eager=True, split_max_tensors=split, model_name=out.stem).write()


def compare_vocabularies(llama_cpp, program):
    """Compares the tokens of texts with those that llama.cpp has beside its vocabularies."""
    import gguf
    import numpy as np

    wrong = 0
    for texts in sorted((llama_cpp / "models").glob("*.gguf.inp")):
        file = texts.with_suffix("")
        right = file.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
        right = [[int(token) for token in line.split()] for line in right]
        texts = texts.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        with tempfile.TemporaryDirectory() as place:
            # The file has no model, so it gets a small one.
            out = Path(place) / "model.gguf"
            writer = gguf.GGUFWriter(out, "llama")
            reader = gguf.GGUFReader(file)
            for key, field in reader.fields.items():
                if key.startswith("tokenizer.") or key == "general.name":
                    kind = field.types[0]
                    sub = field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(key, field.contents(), kind, sub_type=sub)
            rows = len(reader.fields["tokenizer.ggml.tokens"].data)
            writer.add_context_length(8)
            writer.add_embedding_length(4)
            writer.add_block_count(1)
            writer.add_feed_forward_length(4)
            writer.add_head_count(1)
            writer.add_layer_norm_rms_eps(1e-5)
            shapes = {"attn_norm": (4,), "ffn_norm": (4,)} | {
                name: (4, 4)
                for name in "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split()
            }
            shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
            shapes |= {"token_embd": (rows, 4), "output_norm": (4,)}
            for name, shape in shapes.items():
                writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            found = subprocess.run(
                [program, out], input=json.dumps(texts), capture_output=True, text=True
            )
        if found.returncode:
            print(file.name, found.stderr.strip())
            continue
        found = [json.loads(line) for line in found.stdout.splitlines()]
        differ = [at for at, tokens in enumerate(found) if tokens != right[at]]
        print(file.name, f"{len(found) - len(differ)} of {len(texts)} texts are right")
        for at in differ[:3]:
            print("  ", repr(texts[at]), right[at], found[at])
        wrong += len(differ)
    return wrong


def main(llama_cpp, names):
    logging.basicConfig(level=logging.ERROR)
    base = patched(Path(llama_cpp).absolute())
    if names[:1] == ["--vocabularies"]:
        sys.exit(min(compare_vocabularies(Path(llama_cpp), names[1]), 1))
    GGUF.mkdir(exist_ok=True)
    for name, (folder, out_type, changes) in FILES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / folder
            shutil.copytree(FOLDERS / folder, copy)
            CHANGES.clear()
            CHANGES.update(changes)
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": TEMPLATE,
            }
            (copy / "tokenizer_config.json").write_text(json.dumps(settings))
            convert(base, copy, out_type, GGUF / f"{name}.gguf")
        print(name, (GGUF / f"{name}.gguf").stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
