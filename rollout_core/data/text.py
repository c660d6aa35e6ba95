"""Text in, token ids out, and back: templating, tokenising and decoding, apart from any engine.

Training uses the ids made here and by the engine; nothing is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers.decoders import DecodeStream

from rollout_core.base.errors import ConfigError
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import PromptRow
from rollout_core.data.turns import shows_tools
from rollout_core.models.bounded.tokenizing import Chat, Problem, encode, render

_CONTEXT_TOKENS = 8
ENDS_ANSWERED = "has the assistant's message as its last: nothing is asked; leave the answer out"
"""What is wrong with a conversation that nothing follows."""


def tokenize_prompts(tokenizer: Any, rows: Sequence[PromptRow]) -> list[list[int]]:
    """Token ids of each prompt: text as it is, messages through the chat template with the generation prompt. A text
    that begins with the BOS token gets no second one.

    Raises ConfigError when messages do not go through the tokenizer's chat template, or a prompt has no tokens.
    """
    token_ids, problems = try_prompts(tokenizer, rows)
    for place, problem in problems.items():
        raise ConfigError(_located(f"prompt {place + 1}", problem))
    return token_ids


def try_prompts(tokenizer: Any, rows: Sequence[PromptRow]) -> tuple[list[list[int]], dict[int, str]]:
    """Token ids of each prompt, none where it has a problem; and the problems by their place.

    Raises ConfigError where template or tokenizer take too much time or memory for too many.
    """
    token_ids: list[list[int]] = [[] for _ in rows]
    problems: dict[int, str] = {}
    texts = [(place, row.prompt) for place, row in enumerate(rows) if row.prompt is not None]
    talks = [(place, row.messages, row.tools or ()) for place, row in enumerate(rows) if row.messages is not None]
    chats = [Chat(messages, True, tools) for _, messages, tools in talks]
    rendered: list[tuple[int, str]] = []
    for (place, messages, _), text in zip(talks, render_chats(tokenizer, chats), strict=True):
        if isinstance(text, Problem):
            problems[place] = text.reason
        elif messages[-1].role == "assistant":
            problems[place] = ENDS_ANSWERED
        else:
            rendered.append((place, text))
    for some, special_tokens in ((texts, True), (rendered, False)):
        encoded = encode_once(tokenizer, [text for _, text in some], special_tokens=special_tokens)
        for (place, _), ids in zip(some, encoded, strict=True):
            if isinstance(ids, Problem):
                problems[place] = ids.reason
            elif not ids:
                problems[place] = "has no tokens; give at least one character"
            else:
                token_ids[place] = ids
    return token_ids, dict(sorted(problems.items()))


def without_tools(tokenizer: Any, rows: Sequence[PromptRow]) -> list[int]:
    """Places of the conversations whose tools the chat template does not show to the model, or not all of them."""
    found = [(place, row.messages, row.tools) for place, row in enumerate(rows) if row.messages and row.tools]
    chats = [Chat(messages, True, tools) for _, messages, tools in found]
    texts = render_chats(tokenizer, chats)
    return [
        place
        for (place, _, tools), text in zip(found, texts, strict=True)
        if isinstance(text, str) and not shows_tools(text, tools)
    ]


def with_own_bos(tokenizer: Any, rows: Sequence[PromptRow]) -> frozenset[int]:
    """Positions of text prompts that begin with the BOS token, where the tokenizer puts one before every text."""
    bos = tokenizer.bos_token
    found = [place for place, row in enumerate(rows) if bos and row.prompt is not None and row.prompt.startswith(bos)]
    return frozenset(found) if found and _adds_bos(tokenizer) else frozenset()


def _adds_bos(tokenizer: Any) -> bool:
    [ids] = encode(tokenizer, [tokenizer.bos_token], special_tokens=True)
    return not isinstance(ids, Problem) and ids[:2] == [tokenizer.bos_token_id] * 2


def encode_once(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool) -> list[list[int] | Problem]:
    """As `encode`; with ``special_tokens`` a text that begins with the BOS token, as rendered conversations may, gets
    no second one."""
    encoded = encode(tokenizer, texts, special_tokens=special_tokens)
    if not special_tokens or tokenizer.bos_token_id is None:
        return encoded
    twice = [tokenizer.bos_token_id] * 2
    if not any(not isinstance(ids, Problem) and ids[:2] == twice for ids in encoded) or not _adds_bos(tokenizer):
        return encoded
    return [ids[1:] if not isinstance(ids, Problem) and ids[:2] == twice else ids for ids in encoded]


def token_ids_of(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool, where: str = "text") -> list[list[int]]:
    """Token ids of texts, and nothing else that a tokenizer makes; BOS as in `encode_once`. Raises ConfigError for the
    first that has none."""
    found: list[list[int]] = []
    for ids in encode_once(tokenizer, texts, special_tokens=special_tokens):
        if isinstance(ids, Problem):
            raise ConfigError(f"{where}: {ids.reason}")
        found.append(ids)
    return found


def ended(token_ids: Sequence[int], eos: int) -> list[int]:
    """The tokens with EOS at their end, once."""
    return [*token_ids] if token_ids and token_ids[-1] == eos else [*token_ids, eos]


def render_chats(tokenizer: Any, chats: Sequence[Chat]) -> list[str | Problem]:
    """Conversations as the tokenizer's chat template writes them, special tokens included; tokenise them without more.

    Where there is no template, that is the problem of each.
    """
    if not chats:
        return []
    if not tokenizer.chat_template:
        return [
            Problem(
                "holds chat messages, but the tokenizer has no chat template; give plain text, a tokenizer with a "
                "template, or chat_template in the same table as the model's uri"
            )
        ] * len(chats)
    return render(tokenizer, chats)


@dataclass(frozen=True)
class Ask:
    """What a row needs next: conversations rendered, or texts tokenised without special tokens."""

    chats: Sequence[Chat] = ()
    texts: Sequence[str] = ()


T = TypeVar("T")
Encoding = Generator[Ask, list[Any], T]
"""Yields what it needs, gets the answers, one for each chat or text, and returns what a row becomes."""


def in_step(tokenizer: Any, rows: Sequence[tuple[str, Encoding[T]]]) -> list[T | ConfigError]:
    """Run the encodings of rows together, so that what all of them need next is asked for at once.

    Each row comes with its name, with which its error begins: one of its own, or of what it asked for.
    """
    ended: dict[int, T | ConfigError] = {}
    answers: dict[int, list[Any]] = {place: [] for place in range(len(rows))}
    while answers:
        asks: dict[int, Ask] = {}
        for place, answer in answers.items():
            where, encoding = rows[place]
            problem = next((item for item in answer if isinstance(item, Problem)), None)
            try:
                if problem is not None:
                    raise ConfigError(_located(where, problem.reason))
                asks[place] = encoding.send(answer) if answer else next(encoding)
            except StopIteration as end:
                ended[place] = end.value
            except ConfigError as error:
                ended[place] = error
        chats = iter(render_chats(tokenizer, [chat for ask in asks.values() for chat in ask.chats]))
        texts = [text for ask in asks.values() for text in ask.texts]
        encoded = iter(encode(tokenizer, texts, special_tokens=False))
        answers = {
            place: [next(chats) for _ in ask.chats] or [next(encoded) for _ in ask.texts] for place, ask in asks.items()
        }
    return [ended[place] for place in range(len(rows))]


def _located(where: str, problem: str) -> str:
    return f"{where} {problem}" if problem.startswith(("holds ", "has ")) else f"{where}: {problem}"


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


def decode_as_streamed(tokenizer: Any, prompt: Sequence[int], completion: Sequence[int]) -> str:
    """Text of a completion as a server puts it together, token by token behind its prompt, special tokens left out.

    It is that of `decode_completions` but for bytes that make no character: those at the end are held back, and may not
    take back a character that stood before them, as they do in the whole.
    """
    stream = DecodeStream(ids=list(prompt[-_CONTEXT_TOKENS:]), skip_special_tokens=True)
    pieces: list[str | None] = []
    for token in completion:
        try:
            piece = stream.step(tokenizer.backend_tokenizer, token)
        except Exception as error:  # the tokenizers library raises plain Exception
            if not str(error).startswith("Invalid prefix"):
                raise
            # A character is taken back. vLLM starts afresh, and so does this.
            stream = DecodeStream(skip_special_tokens=True)
            piece = stream.step(tokenizer.backend_tokenizer, token)
        pieces.append(piece)
    return "".join(piece or "" for piece in pieces)


def text_tokens(token_ids: Sequence[int], params: SamplingParams, ends: Sequence[int] = ()) -> Sequence[int]:
    """Those tokens of a finished completion that its text is made of: all but a stop token, or an end of its turn, at
    its end."""
    is_stopped = token_ids and (token_ids[-1] in params.stop_token_ids or token_ids[-1] in ends)
    return token_ids[:-1] if is_stopped else token_ids
