"""What llama.cpp takes for the prompts and replies that `mpmd bench model` measures: a Llama of
124 million random weights, computed on the host's processors. Prints the same lines.

    python llama_model.py [--half] [--threads N] [--repeats N] [--clients 1,8]
"""

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time

import gguf
import llama_cpp as lib
import numpy as np

WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY = 768, 2048, 12, 12, 50257
PROMPT, SHORT, REPLY = 512, 16, 64


def write_model(path, half):
    """Writes the model's file. All matrices have the type of the weights, norms are f32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")

    random = np.random.default_rng(0)

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns), dtype=np.float32) * 0.02
        kind = gguf.GGMLQuantizationType.BF16 if half else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    def norm(name):
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))

    matrix("token_embd.weight", VOCABULARY, WIDTH)
    norm("output_norm.weight")
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        norm(block + "ffn_norm.weight")
        for name in ["attn_q", "attn_k", "attn_v", "attn_output"]:
            matrix(block + name + ".weight", WIDTH, WIDTH)
        matrix(block + "ffn_gate.weight", HIDDEN, WIDTH)
        matrix(block + "ffn_up.weight", HIDDEN, WIDTH)
        matrix(block + "ffn_down.weight", WIDTH, HIDDEN)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Model:
    def __init__(self, path, threads, clients):
        lib.llama_backend_init()
        # Its log is long, and on standard error.
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.quiet, ctypes.c_void_p(0))
        of_model = lib.llama_model_default_params()
        of_model.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(path.encode(), of_model)
        assert self.model, "the file cannot be loaded"

        of_context = lib.llama_context_default_params()
        of_context.n_ctx = max(PROMPT + 1, clients * (SHORT + REPLY)) + 256
        of_context.n_batch = of_context.n_ubatch = max(PROMPT, clients * SHORT)
        of_context.n_seq_max = clients
        of_context.kv_unified = True
        of_context.n_threads = of_context.n_threads_batch = threads
        # Keys and values are f32 on the other side.
        of_context.type_k = of_context.type_v = lib.GGML_TYPE_F32
        self.context = lib.llama_init_from_model(self.model, of_context)
        assert self.context, "no context"
        self.batch = lib.llama_batch_init(of_context.n_batch, 0, 1)

    def forget(self):
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def compute(self, entries):
        """Computes (token, position, sequence, wants logits), and returns the chosen tokens."""
        self.batch.n_tokens = len(entries)
        for at, (token, position, sequence, wanted) in enumerate(entries):
            self.batch.token[at] = token
            self.batch.pos[at] = position
            self.batch.n_seq_id[at] = 1
            self.batch.seq_id[at][0] = sequence
            self.batch.logits[at] = wanted
        assert lib.llama_decode(self.context, self.batch) == 0, "llama_decode has failed"

        def choice(at):
            logits = lib.llama_get_logits_ith(self.context, at)
            return int(np.ctypeslib.as_array(logits, (VOCABULARY,)).argmax())

        return [choice(at) for at, entry in enumerate(entries) if entry[3]]

    def prompt_rate(self, round):
        self.forget()
        tokens = [(round * 7919 + at * 104_729) % 1000 for at in range(PROMPT)]
        begin = time.perf_counter()
        self.compute([(token, at, 0, at == PROMPT - 1) for at, token in enumerate(tokens)])
        return PROMPT / (time.perf_counter() - begin)

    def reply_rate(self, clients, round):
        self.forget()
        prompts = [
            ((round * clients + client) * 7919 + at * 104_729, at, client, at == SHORT - 1)
            for client in range(clients)
            for at in range(SHORT)
        ]
        tokens = self.compute([(token % 1000, *rest) for token, *rest in prompts])
        begin = time.perf_counter()
        for position in range(SHORT, SHORT + REPLY - 1):
            tokens = self.compute([(t, position, c, True) for c, t in enumerate(tokens)])
        return clients * (REPLY - 1) / (time.perf_counter() - begin)


def show(name, parameters, rates):
    median = statistics.median(rates)
    print(json.dumps({"name": name, "parameters": parameters, "median": median,
                      "unit": "tokens/s", "repeats": len(rates)}), flush=True)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--half", action="store_true")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--clients", default="1,8")
    options = options.parse_args()
    clients = [int(count) for count in options.clients.split(",")]

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        write_model(path, options.half)
        model = Model(path, options.threads, max(clients))
        rates = [model.prompt_rate(round) for round in range(options.repeats + 1)]
        # The first finds new memory.
        show("prompt", f"{PROMPT} tokens", rates[1:])
        for count in clients:
            rates = [model.reply_rate(count, round) for round in range(options.repeats + 1)]
            show("replies", f"{count} clients", rates[1:])


if __name__ == "__main__":
    main()
