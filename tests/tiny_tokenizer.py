"""A small byte-level BPE tokenizer with a chat template, written to a folder in the Hugging Face layout.

Trained on a few sentences in well under a second, so that tests need no downloaded tokenizer.
"""

from __future__ import annotations

from pathlib import Path

BOS, START, END, PAD = "<|bos|>", "<|start|>", "<|end|>", "<|pad|>"

CHAT = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
"""Turns between special tokens, no BOS."""

CHAT_WITH_BOS = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}{% endfor %}"
)
"""Writes BOS, trims contents; with `bos=True` the tokenizer adds BOS too, as Llama 3's does."""

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT
)

SEAMLESS = (
    "{% for message in messages %}{{ 'the' if loop.first else 'an' }}{{ message['content'] }}{% endfor %}"
)
"""No special token and no blank anywhere: the tokens at the edge of a response merge with it."""

THINKING = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ 'think\\n\\nthought\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|end|>\\n' }}{% endfor %}"
)
"""Writes an empty thought into the last turn only: no rendering is a prefix of a longer one."""

WITH_TOOLS = (
    "{% if tools %}{{ '<|start|>tools\\n' + tools | tojson + '<|end|>\\n' }}{% endif %}"
    "{% for message in messages if message.role in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ '<|start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content and enable_thinking | default(true) %}"
    "{{ 'think ' + message.reasoning_content + '\\n\\n' }}{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
"""Writes tools, tool calls and thoughts; leaves out messages of the role developer, and contents that are no text."""

PARTS = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '<|end|>\\n' }}{% endfor %}"
)
"""Reads contents that are lists of parts."""

DATED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = 'never' %}{%- endif %}"
    "{%- endif %}{{ '<|start|>system\\nToday: ' + date_string + '<|end|>\\n' }}"
) + CHAT
"""Shows the current date, as Llama 3.1's does."""

_TEXT = [
    "The user asks a question and the assistant gives an answer that the user may like or not.",
    "Post 1 (Category: travel): I have been walking in the hills for years and would never take a car.",
    "What should I cook tonight? Something quick, with vegetables, and nothing that needs an oven.",
    "another answer, another assistant, another theatre; that thing there then the rest.",
]


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = CHAT,
    bos: bool = False,
    eos: bool = False,
    pad: str | None = PAD,
    vocab_size: int = 400,
    style: str = "byte-level",
) -> Path:
    """Writes a tokenizer to `folder` and returns the folder.

    Args:
      folder: made if it does not exist.
      template: its chat template, None for none.
      bos, eos: whether tokenising with special tokens adds BOS in front, END behind.
      pad: padding token, None for none.
      vocab_size: of the trained vocabulary.
      style: how blanks are treated: "byte-level" (GPT-2, Llama 3, Qwen), "prepend" (a normaliser puts
        one before every stretch of text: Llama 2), "metaspace" (one before the text: Mistral, Gemma).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    if style == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.model = models.BPE(unk_token=PAD, fuse_unk=True)
        if style == "prepend":
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join([BOS] * bos + ["$A"] + [END] * eos),
            special_tokens=[(token, backend.token_to_id(token)) for token in (BOS, END)],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=END, pad_token=pad, chat_template=template
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return folder
