"""Makes the adapters of this folder with `peft`, and the scores that it gives models with them.

    pip install torch transformers peft
    python3 make_adapters.py
"""

import json
import os
import shutil

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDERS = os.path.join(HERE, "..", "folders")
TOKENS = 60
# The rank and alpha of one kind of modules, and another alpha for one layer; all linear layers; and
# the transposed matrices of GPT-2 with the scale of rank-stabilised LoRA.
ADAPTERS = {
    "grouped": dict(
        r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"],
        alpha_pattern={"layers.1.self_attn.q_proj": 12},
    ),
    "phi3": dict(r=2, lora_alpha=4, target_modules="all-linear"),
    "gpt2": dict(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
        use_rslora=True,
    ),
}

scores = {}
for name, settings in ADAPTERS.items():
    torch.manual_seed(1)
    folder = os.path.join(FOLDERS, name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Not zero, so that the adapter changes the model.
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(model, config).eval()
    to = os.path.join(HERE, name)
    shutil.rmtree(to, ignore_errors=True)
    model.save_pretrained(to)
    os.remove(os.path.join(to, "README.md"))
    file = os.path.join(to, "adapter_config.json")
    with open(file) as text:
        saved = json.load(text)
    saved["base_model_name_or_path"] = name
    if isinstance(saved["target_modules"], list):
        saved["target_modules"].sort()
    with open(file, "w") as text:
        json.dump(saved, text, indent=2)
        text.write("\n")

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(FOLDERS, "text.txt")) as text:
        tokens = tokenizer(text.read(), add_special_tokens=False)["input_ids"][:TOKENS]
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1]
    scores[name] = torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item()

with open(os.path.join(HERE, "scores.json"), "w") as text:
    json.dump(scores, text, indent=2)
    text.write("\n")
