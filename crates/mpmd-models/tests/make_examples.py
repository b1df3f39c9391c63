"""Makes `folders/examples.json`: examples for the folder `plain`, with the results of others.

    python3 tests/make_examples.py

Run it in `crates/mpmd-models/`, with `torch`, `transformers` and `jinja2` installed. The templates are made
for this test: each has some of what those of model hubs have.
"""

import json
import tempfile
from pathlib import Path

import torch
from make_folders import DECAY, HERE, RATE
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

STEPS = 10
FOLDER = HERE / "plain"

# A system message by default, blocks on lines of their own, and a call of a macro.
PLAIN = """{%- macro turn(role, text) %}
{{- '<|' ~ role ~ '|>' + text | trim + eos_token + '\\n' }}
{%- endmacro %}
{% if messages[0].role != 'system' %}
{{ turn('system', 'You help.') }}
{%- endif %}
{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {% endif %}
{{ turn(message.role, message.content) }}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{%- endif %}"""

# The first token of a text, pairs of turns, and the system message inside the first.
PAIRS = """{% set system = '' %}{% if messages[0]['role'] == 'system' %}\
{% set system = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate') }}{% endif %}\
{% if message['role'] == 'user' %}\
{{ '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

# Earlier replies lose their thoughts: each reply has a text of its own. Tools are written as JSON.
THOUGHTS = """{%- if tools is iterable and tools | length > 0 %}{{ '[tools]' }}{% for tool in tools %}\
{{ '\\n' ~ (tool | tojson) ~ (tool | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':'))) }}\
{% endfor %}{{ '\\n' }}{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages[::-1] %}{% if message.role == 'user' and ns.last < 0 %}\
{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages %}
{%- set text = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '#' + message.role.upper() + '\\n' + text + '\\n' }}
{%- if message.tool_calls is defined and message.tool_calls %}
{%- for call in message.tool_calls %}{{ call.function | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- if loop.last %}{% continue %}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n' if messages else '' }}{{ '#ASSISTANT\\n' }}{% endif %}"""

# Says itself what a reply is.
MARKED = """{% for message in messages %}{{ '<' + message.role + '>' }}\
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\
{%- else %}{{ message.content }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""

TEMPLATES = dict(plain=PLAIN, pairs=PAIRS, thoughts=THOUGHTS, marked=MARKED)
TEMPLATES["lines_of_windows"] = PLAIN.replace("\n", "\r\n")
TEMPLATES["commented"] = "{# without {% generation %} #}" + PLAIN

USER = dict(role="user", content="  What is a *put*? ")
REPLY = dict(role="assistant", content="It places an array on devices.", tool_calls=None)
CONVERSATIONS = [
    [USER, REPLY],
    [dict(role="system", content="Be brief: caf\u00e9."), USER, REPLY],
    [
        USER,
        dict(role="assistant", content="<think>\nhm\n</think>\n\nA call."),
        dict(role="user", content="And then?"),
        dict(role="assistant", content="<think>\nso\n</think>\n\nA read."),
    ],
]
TOOLS = [dict(name="add", parameters=dict(b=1, a=[1.5, None, True], c="<&'\u00e9>"))]
CALLS = [
    USER,
    dict(role="assistant", content=None, tool_calls=[dict(function=dict(name="add", arguments={}))]),
    dict(role="tool", content="3"),
    REPLY,
]

EXAMPLES = [
    ("A kernel", " computes on the devices of a mesh."),
    ("The program:\n", "fn main() {}\n"),
    ("Q: which process runs it?\nA:", " Every process of the job, from the first line to the last."),
    ("put", ""),
    ("", "A reply without a prompt."),
    ("Every process of the job runs it from the first line to the last. " * 2, "Yes."),
    ("1 2 3", " 4 5 6"),
    ("It uses arrays", " in three ways: put, call and read."),
]


def texts_of(tokenizer, template, messages, tools):
    """Returns the texts of a conversation, each with the ranges of characters that are replies."""

    def render(some, asks=False):
        return tokenizer.apply_chat_template(
            some, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=asks
        )

    parts = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, text = render(messages[:at], True), render(messages[: at + 1])
            assert text.startswith(prompt), (prompt, text)
            parts.append((text, (len(prompt), len(text))))
    last = parts[-1][0]
    if all(last.startswith(text) for text, _ in parts):
        return [(last, [reply for _, reply in parts])]
    return [(text, [reply]) for text, reply in parts]


def conversation(tokenizer, name, messages, tools=None):
    template = TEMPLATES[name]
    if name == "marked":
        found = tokenizer.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        return [list(zip(found["input_ids"], found["assistant_masks"]))]
    examples = []
    for text, replies in texts_of(tokenizer, template, messages, tools):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        in_reply = lambda end: any(start < end <= stop for start, stop in replies)
        mask = [int(in_reply(end)) for _, end in found["offset_mapping"]]
        examples.append(list(zip(found["input_ids"], mask)))
    return examples


def completion(tokenizer, prompt, completion):
    """Counts the prompt's tokens by themselves, as other trainers do."""
    ids, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + completion)["input_ids"]
    assert whole[: len(ids)] == ids, (prompt, completion)
    whole.append(tokenizer.eos_token_id)
    return [(token, int(at >= len(ids))) for at, token in enumerate(whole)]


def loss_of(model, examples):
    """Returns the mean loss of the marked tokens, each example by itself."""
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([[token for token, _ in example]])
        mask = torch.tensor([marked for _, marked in example])[1:]
        logits = model(ids[:, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total, count = total + (losses * mask).sum(), count + mask.sum().item()
    return total / count


def train(examples):
    """Trains on all examples in each step. Returns the losses."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    parameters = list(model.parameters())
    groups = [
        dict(params=[w for w in parameters if w.dim() >= 2], weight_decay=DECAY),
        dict(params=[w for w in parameters if w.dim() < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, examples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sampling():
    """Returns logits, settings, and the probabilities of the tokens that may be chosen."""
    generator = torch.Generator().manual_seed(5)
    prompt = [1, 4, 4, 30]
    cases = []
    for temperature, top_k, top_p, min_p, repetition_penalty in [
        (1.0, 0, 1.0, 0.0, 1.0),
        (0.5, 0, 1.0, 0.0, 1.0),
        (2.0, 5, 1.0, 0.0, 1.0),
        (1.0, 1, 1.0, 0.0, 1.0),
        (1.0, 400, 1.0, 0.0, 1.0),
        (1.0, 0, 0.9, 0.0, 1.0),
        (0.7, 0, 0.3, 0.0, 1.0),
        (1.0, 0, 0.01, 0.0, 1.0),
        (1.0, 0, 1.0, 0.1, 1.0),
        (1.0, 0, 1.0, 1.0, 1.0),
        (0.8, 10, 0.8, 0.05, 1.0),
        (1.0, 0, 1.0, 0.0, 1.5),
        (1.3, 7, 0.95, 0.02, 0.8),
    ]:
        logits = 3 * torch.randn(1, 40, generator=generator)
        steps = [RepetitionPenaltyLogitsProcessor(repetition_penalty)]
        steps.append(TemperatureLogitsWarper(temperature))
        steps += [TopKLogitsWarper(top_k)] if top_k > 0 else []
        steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        steps += [MinPLogitsWarper(min_p)] if min_p > 0 else []
        kept = LogitsProcessorList(steps)(torch.tensor([prompt]), logits.clone())
        cases.append(
            dict(
                logits=logits[0].tolist(),
                prompt=prompt,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                probabilities=kept[0].double().softmax(0).tolist(),
            )
        )
    return cases


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text((FOLDER / "tokenizer.json").read_text())
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(path), bos_token="<s>", eos_token="</s>"
        )
    conversations = []
    for name in TEMPLATES:
        for messages in CONVERSATIONS:
            examples = conversation(tokenizer, name, messages)
            line = json.dumps(dict(messages=messages))
            conversations.append(dict(template=name, line=line, examples=examples))
    examples = conversation(tokenizer, "thoughts", CALLS, TOOLS)
    line = json.dumps(dict(messages=CALLS, tools=TOOLS))
    conversations.append(dict(template="thoughts", line=line, examples=examples))
    completions = [completion(tokenizer, *example) for example in EXAMPLES]
    result = dict(
        templates=TEMPLATES,
        conversations=conversations,
        completions=[
            dict(prompt=prompt, completion=reply, example=example)
            for (prompt, reply), example in zip(EXAMPLES, completions)
        ],
        rate=RATE,
        decay=DECAY,
        losses=train(completions),
        sampling=sampling(),
    )
    (HERE / "examples.json").write_text(json.dumps(result) + "\n")
    print(result["losses"], [len(example) for example in completions])


if __name__ == "__main__":
    main()
