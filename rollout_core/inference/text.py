"""Text in, token ids out, and back: templating, tokenising and decoding, apart from any engine.

Training uses the ids made here and by the engine; nothing is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from rollout_core.config import SamplingParams
from rollout_core.datasets import ChatMessage, PromptRow
from rollout_core.errors import ConfigError

_CONTEXT_TOKENS = 8


def tokenize_prompts(tokenizer: Any, rows: Sequence[PromptRow]) -> list[list[int]]:
    """Token ids of each prompt: text as it is, messages through the chat template with the generation prompt.

    Raises ConfigError when messages do not go through the tokenizer's chat template, or a prompt has no tokens.
    """
    texts = [row.prompt for row in rows if row.prompt is not None]
    chats = [
        render_chat(tokenizer, row.messages, f"prompt {number}", generation_prompt=True)
        for number, row in enumerate(rows, start=1)
        if row.messages is not None
    ]
    plain_ids = iter(token_ids_of(tokenizer, texts, special_tokens=True) if texts else [])
    chat_ids = iter(token_ids_of(tokenizer, chats, special_tokens=False) if chats else [])
    ids = [next(plain_ids if row.messages is None else chat_ids) for row in rows]
    for number, token_ids in enumerate(ids, start=1):
        if not token_ids:
            raise ConfigError(f"prompt {number} has no tokens; give at least one character")
    return ids


def token_ids_of(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
    """Token ids of texts, and nothing else that a tokenizer makes."""
    return tokenizer(
        texts, add_special_tokens=special_tokens, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]


def render_chat(tokenizer: Any, messages: Sequence[ChatMessage], where: str, *, generation_prompt: bool) -> str:
    """A conversation as the tokenizer's chat template writes it, special tokens included; tokenise it without more.

    Raises ConfigError naming ``where`` when there is no template, or it refuses these messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{where} holds chat messages, but the tokenizer has no chat template; "
            "give plain text, or a tokenizer with a template"
        )
    try:
        return tokenizer.apply_chat_template(
            [message.model_dump() for message in messages], add_generation_prompt=generation_prompt, tokenize=False
        )
    except (TemplateError, TypeError) as error:
        raise ConfigError(f"{where}: the chat template refuses these messages: {error}") from error


def decode_completions(
    tokenizer: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[str]:
    """Text of each completion as it reads after its prompt, special tokens left out.

    A completion is decoded behind the last tokens of its prompt, which are then cut off: tokenizers that mark word
    starts (SentencePiece) drop the first space of a text decoded alone.
    """
    heads = [list(prompt[-_CONTEXT_TOKENS:]) for prompt in prompts]
    wholes = [head + list(completion) for head, completion in zip(heads, completions, strict=True)]
    head_texts = tokenizer.batch_decode(heads, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    whole_texts = tokenizer.batch_decode(wholes, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    texts = []
    for head, whole, completion in zip(head_texts, whole_texts, completions, strict=True):
        if whole.startswith(head):
            texts.append(whole[len(head) :])
        else:
            # The prompt ends inside a character that the completion finishes.
            texts.append(
                tokenizer.decode(list(completion), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
    return texts


def told_tokens(token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
    """Those tokens of a finished completion that its text is made of: all but a stop token at its end."""
    return token_ids[:-1] if token_ids and token_ids[-1] in params.stop_token_ids else token_ids
