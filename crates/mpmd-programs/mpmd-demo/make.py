"""Makes the tokenizer of the demonstration model, and the conversations that it was trained on.

    python3 make.py GUIDE CHATS     from GUIDE/*.md: tokenizer.json here, and the file CHATS

It needs `tokenizers`. A question is a heading, or has words of a paragraph; its answer is prose of
the guide that stands there. Some other questions have an answer that says who the model is. README.md
says how the model was trained.
"""

import json
import random
import re
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
VOCABULARY = 1024
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
# Times that the guide is told, with other questions and in another order.
ROUNDS = 30
# Largest number of tokens of a conversation, and of bytes of an answer.
LONGEST, LONGEST_ANSWER = 900, 420
ABOUT = (
    "I am mpmd-demo, a tiny model that was trained on the guide of mpmd alone. I show that serving "
    "works. Ask me about mpmd, and do not trust my answers."
)
# Questions that the guide does not answer.
OTHERS = """Hi;Hello;Hello!;Hi there;Hey;Good morning;How are you?;Who are you?;What are you?;Test;Help;
What can you do?;What is your name?;Tell me a joke;Write a poem about cats;Write a story;Sing a song;
What is the capital of France?;Who is the president?;What is 2 + 2?;What is the weather today?;
Translate this to German;Do you like music?;Where do you live?;How old are you?;Thank you;Thanks!;Bye;
Why is the sky blue?;Give me a recipe for soup;What is love?;Tell me about history;Who made you?;
Write code in Python;What is the meaning of life?;Can you help me?;Tell me something;Is it cold?"""
ASKED = ["{}", "{}?", "What is {}?", "What about {}?", "Tell me about {}", "Explain {}"]
# Questions with words of a paragraph.
WORDS = ["How does {} work?", "Why {}?", "What is {}?", "{}", "How do I use {}?", "How do {}?", "{}?"]


def prose(text):
    """Returns the paragraphs of a page's text without code blocks, tables and links."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        if lines and not any(line.startswith(("|", "#", "<")) for line in lines):
            paragraphs.append(re.sub(":$", ".", " ".join(lines)))
    return paragraphs


def answer(paragraphs):
    """Returns sentences from the first paragraphs, up to the longest answer."""
    found = ""
    for sentence in re.split(r"(?<=[.:;]) ", " ".join(paragraphs)):
        if found and len(found) + len(sentence) + 1 > LONGEST_ANSWER:
            break
        found = f"{found} {sentence}".strip()
    return found[:LONGEST_ANSWER]


def pairs(page, choice):
    """Returns pairs of (question, answer) of a page."""
    title, *sections = re.split(r"^#+ ", page, flags=re.M)[1:]
    name = title.splitlines()[0].replace("`", "")
    found = []
    for section in [title, *sections]:
        heading, _, text = section.partition("\n")
        heading, paragraphs = heading.replace("`", ""), prose(text)
        if not paragraphs:
            continue
        subject = heading if section is title else choice.choice([heading, f"{name}: {heading}"])
        found.append((choice.choice(ASKED).format(subject), answer(paragraphs)))
        for at, paragraph in enumerate(paragraphs):
            words = re.findall(r"`[^`]{3,30}`|\b[a-z]{5,}\b", paragraph) or [heading]
            words = choice.sample(words, min(len(words), choice.randint(1, 3)))
            asked = choice.choice(WORDS).format(" ".join(words).replace("`", ""))
            found.append((asked, answer(paragraphs[at:])))
    return found


def chats(pages, tokens):
    """Returns conversations of several questions and answers. `tokens` counts those of a text."""
    choice = random.Random(0)
    others = [other.strip() for other in OTHERS.split(";")]
    for _ in range(ROUNDS):
        told = [pair for page in pages for pair in pairs(page, choice)]
        told += [(other, ABOUT) for other in others]
        choice.shuffle(told)
        messages, length = [], 0
        for asked, reply in told:
            asked = asked.lower() if choice.random() < 0.3 else asked
            own = tokens(asked) + tokens(reply) + 4
            if length + own > LONGEST and messages:
                yield messages
                messages, length = [], 0
            messages += [{"role": "user", "content": asked}]
            messages += [{"role": "assistant", "content": reply}]
            length += own
        yield messages


def tokenizer(pages):
    """Returns a tokenizer of bytes and of frequent sequences of them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(prose(page)) for page in pages], trainer)
    return made


if __name__ == "__main__":
    guide, to = sys.argv[1:]
    pages = [page.read_text() for page in sorted(Path(guide).glob("*.md"))]
    made = tokenizer(pages)
    made.save(str(HERE / "tokenizer.json"))
    told = list(chats(pages, lambda text: len(made.encode(text).ids)))
    Path(to).write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in told))
    print(f"{len(told)} conversations")
