"""What `transformers` takes for the steps that `mpmd bench model --train` measures: a Llama of 124
million random weights, AdamW, microbatches that follow each other. Prints the same line.

    python llama_training.py [--threads N] [--repeats N]
"""

import argparse
import json
import os
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, MICROBATCHES, VOCABULARY = 256, 2, 50257


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--repeats", type=int, default=3)
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=True, vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    rates = []
    # The first step finds new memory.
    for step in range(options.repeats + 1):
        data = torch.randint(256, (MICROBATCHES, 1, TOKENS))
        begin = time.perf_counter()
        for rows in data:
            (model(input_ids=rows, labels=rows).loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:
            rates.append(MICROBATCHES * TOKENS / (time.perf_counter() - begin))
    parameters = f"{MICROBATCHES} microbatches of {TOKENS} tokens"
    print(json.dumps({"name": "training", "parameters": parameters,
                      "median": statistics.median(rates), "unit": "tokens/s",
                      "repeats": len(rates)}))


if __name__ == "__main__":
    main()
