"""The checks of IFEval: whether a text follows instructions that a program can verify.

Zhou and others, *Instruction-Following Evaluation for Large Language Models*, arXiv:2311.07911. Ids, arguments and what
they mean are those of its data set, so that its rows can be used as they are. Two checks count otherwise than the
paper's code, which takes a trained model of NLTK for them: sentences end at ``.``, ``!`` or ``?`` before white space
and not after a common abbreviation, and a word in capitals is one of letters, digits and apostrophes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_core.base.errors import ConfigError, near, shown
from rollout_core.config.verifiers import InstructionsReward

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATIONS = r"(?<!\b(?:Mr|Ms|Dr|St|Jr|Sr|vs))(?<!\b(?:Mrs|etc|e\.g|i\.e))(?<!\b(?:Prof))(?<!\b[A-Z])"
_SENTENCE_END = re.compile(_ABBREVIATIONS + r"[.!?]+[\"')\]]*(?=\s|$)")
_PUNCTUATION = ".,?!'\""


def instructions_reward(spec: InstructionsReward, completion: str, extras: Mapping[str, Any]) -> float:
    """The share of the row's instructions that ``completion`` follows, or 1 where it follows all and else 0. Raises
    ConfigError where the row's instructions or their arguments are not IFEval's."""
    followed = followed_instructions(spec, completion, extras)
    return float(all(followed)) if spec.value == "all" else sum(followed) / len(followed)


def followed_instructions(spec: InstructionsReward, completion: str, extras: Mapping[str, Any]) -> list[bool]:
    """Whether each of the row's instructions is followed, in order."""
    ids, given = extras[spec.ids_key], extras[spec.kwargs_key]
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise ConfigError(f"the row's {spec.ids_key!r} is {shown(ids)}; expected a list of instruction ids")
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(ids):
        raise ConfigError(
            f"the row's {spec.kwargs_key!r} is {shown(given)}; expected a list of {len(ids)} tables, one for each "
            f"instruction in {spec.ids_key!r}"
        )
    texts = _loosened(completion) if spec.loose else [completion]
    found = []
    for name, kwargs in zip(ids, given, strict=True):
        check = _check(str(name), kwargs)
        found.append(any(text.strip() and check(text) for text in texts))
    return found


def _check(name: str, kwargs: Any) -> Callable[[str], bool]:
    if name not in CHECKS:
        raise ConfigError(f"instruction {name!r} is not known; {near(name, CHECKS)}")
    check, names = CHECKS[name]
    if not isinstance(kwargs, Mapping | None):
        raise ConfigError(f"the arguments of instruction {name} are {shown(kwargs)}; expected a table")
    arguments = {key: value for key, value in (kwargs or {}).items() if value is not None}
    if missing := [key for key in names if key not in arguments]:
        raise ConfigError(f"instruction {name} needs {', '.join(missing)}; its arguments are {shown(arguments)}")
    values = [arguments[key] for key in names]
    return lambda text: check(text, *values)


def _loosened(completion: str) -> list[str]:
    """The forms of which one has to follow an instruction, as IFEval's loose accuracy has it."""
    lines = completion.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(part).strip() for part in cut]
    texts[0] = completion
    return [form for text in texts for form in (text, text.replace("*", ""))]


def _compared(number: int, relation: str, wanted: int) -> bool:
    match relation:
        case "less than":
            return number < wanted
        case "at least":
            return number >= wanted
    raise ConfigError(f"relation {relation!r} of an instruction; expected 'less than' or 'at least'")


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(len(re.findall(keyword.strip(), text, re.IGNORECASE)), relation, frequency)


def _forbidden_words(text: str, words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in words)


def _letter_frequency(text: str, letter: str, frequency: int, relation: str) -> bool:
    return _compared(text.lower().count(letter.strip().lower()), relation, frequency)


def detect_language(text: str) -> str | None:
    """ISO 639-1 code, the same at each call; None where the text has no words to tell by."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return detect(text)
    except LangDetectException:
        return None


def _is_language(text: str, language: str) -> bool:
    return detect_language(text) in (None, language)


def count_sentences(text: str) -> int:
    """Sentences of an English text, an end without a mark counting as one."""
    ends = [end.end() for end in _SENTENCE_END.finditer(text)]
    rest = text[ends[-1] :] if ends else text
    return len(ends) + bool(rest.strip())


def _sentences(text: str, number: int, relation: str) -> bool:
    return _compared(count_sentences(text), relation, number)


def _paragraphs(text: str, number: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    ends = sum(not part.strip() for part in {0: parts[0], len(parts) - 1: parts[-1]}.values())
    return len(parts) - ends == number


def _words(text: str, number: int, relation: str) -> bool:
    return _compared(len(re.findall(r"\w+", text)), relation, number)


def _paragraph_first_word(text: str, number: int, nth: int, first_word: str) -> bool:
    if nth < 1:
        raise ConfigError(f"nth_paragraph of an instruction is {nth}; expected 1 or more")
    paragraphs = text.split("\n\n")
    found = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if nth > found or found != number or not (words := paragraphs[nth - 1].split()):
        return False
    word = words[0].lstrip("'").lstrip('"')
    end = next((place for place, letter in enumerate(word) if letter in _PUNCTUATION), len(word))
    return word[:end].lower() == first_word.lower()


def _placeholders(text: str, number: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= number


def _postscript(text: str, marker: str) -> bool:
    written = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = written.get(marker.strip(), r"\s*" + marker.strip().lower() + r".*$")
    return bool(re.search(pattern, text.lower(), re.MULTILINE))


def _bullets(text: str, number: int) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == number


def _constrained(text: str) -> bool:
    return any(answer in text for answer in ANSWERS)


def _highlights(text: str, number: int) -> bool:
    single = [part for part in re.findall(r"\*[^\n\*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", text) if part.strip("*").strip()]
    return len(single) + len(double) >= number


def _sections(text: str, splitter: str, number: int) -> bool:
    return len(re.split(r"\s?" + splitter.strip() + r"\s?\d+\s?", text)) - 1 >= number


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    answers = [part.strip() for part in parts if part.strip()]
    return len(answers) == 2 and answers[0] != answers[1]


def _repeats(text: str, prompt: str) -> bool:
    return text.strip().lower().startswith(prompt.strip().lower())


def _ends(text: str, phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(text: str, frequency: int, relation: str) -> bool:
    words = re.findall(r"\w[\w'-]*", text)
    return _compared(sum(word.isupper() for word in words), relation, frequency)


def _capitals(text: str) -> bool:
    return text.isupper() and _is_language(text, "en")


def _lowercase(text: str) -> bool:
    return text.islower() and _is_language(text, "en")


def _no_comma(text: str) -> bool:
    return "," not in text


CHECKS: Mapping[str, tuple[Callable[..., bool], tuple[str, ...]]] = {
    "keywords:existence": (_keywords, ("keywords",)),
    "keywords:frequency": (_keyword_frequency, ("keyword", "frequency", "relation")),
    "keywords:forbidden_words": (_forbidden_words, ("forbidden_words",)),
    "keywords:letter_frequency": (_letter_frequency, ("letter", "let_frequency", "let_relation")),
    "language:response_language": (_is_language, ("language",)),
    "length_constraints:number_sentences": (_sentences, ("num_sentences", "relation")),
    "length_constraints:number_paragraphs": (_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (_words, ("num_words", "relation")),
    "length_constraints:nth_paragraph_first_word": (
        _paragraph_first_word,
        ("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_content:number_placeholders": (_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (_bullets, ("num_bullets",)),
    "detectable_format:constrained_response": (_constrained, ()),
    "detectable_format:number_highlighted_sections": (_highlights, ("num_highlights",)),
    "detectable_format:multiple_sections": (_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (_is_json, ()),
    "detectable_format:title": (_title, ()),
    "combination:two_responses": (_two_responses, ()),
    "combination:repeat_prompt": (_repeats, ("prompt_to_repeat",)),
    "startend:end_checker": (_ends, ("end_phrase",)),
    "startend:quotation": (_quoted, ()),
    "change_case:capital_word_frequency": (_capital_words, ("capital_frequency", "capital_relation")),
    "change_case:english_capital": (_capitals, ()),
    "change_case:english_lowercase": (_lowercase, ()),
    "punctuation:no_comma": (_no_comma, ()),
}
"""By id: what tells whether a text follows it, and the arguments that it takes."""
