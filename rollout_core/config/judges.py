"""A reward that models give: which endpoints judge, by which rubric and scale, and what they may cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rollout_core.base.errors import ConfigError, shown
from rollout_core.base.templates import variables_of
from rollout_core.config.inference import EndpointAddress, TokenBudget, TokenPrices, refuse_decided
from rollout_core.config.reward_settings import RewardSettings
from rollout_core.config.templates import JinjaTemplate, required_variables

GIVEN_NAMES = ("prompt", "completion", "completions", "reference", "rubric", "lowest", "highest", "row")
"""That every template knows, besides the keys of the prompt's row."""
CHOICES = {"completion": 1.0, "reference": 0.0, "tie": 0.5}
"""Of a person, in a pair."""


class JudgeEndpoint(RewardSettings, TokenPrices):
    """A model that judges, at an endpoint. Its answers count as those of ``model`` in ``revision``, at this address."""

    url: EndpointAddress
    """Up to and with the version, such as ``https://api.openai.com/v1``."""
    api: Literal["openai", "anthropic"] = "openai"
    """``openai``: posted to ``/chat/completions``, as vLLM's server takes it, too; ``anthropic``: to ``/messages``."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    revision: str = Field(default="", max_length=200)
    """What you call the model's present state, such as a date. Another one has every question asked anew."""
    api_key: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """NAME of the secret that is the endpoint's key: ``ROLLOUT_SECRET_<NAME>`` in the worker's environment, where
    ``ROLLOUT_SECRETS`` must list it."""
    max_tokens: int = Field(default=512, ge=16)
    """Longest answer, in tokens; it is reserved of the budget for each question under way."""
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    """Of its sampling."""
    send_temperature: bool = True
    """Whether the temperature is sent; some models refuse any, and then the endpoint's own counts."""
    guided: bool = True
    """Ask an ``openai`` endpoint for JSON of the answer's schema (``response_format``). Turn it off for one that does
    not know this."""
    body: dict[str, Any] = Field(default={})
    """Further keys of each request's body. ``max_completion_tokens`` among them takes the place of ``max_tokens``, as
    some models of OpenAI want it. Refused are keys that other settings, or the question, decide, such as ``model``."""
    max_concurrency: int = Field(default=16, ge=1)
    """Most questions under way. They become fewer while the endpoint answers 429, and more again afterwards. Judges of
    the same address, model and limits share them within a process."""
    requests_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most requests a minute. Default: any number."""
    tokens_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most tokens a minute, of questions and answers. Default: any number."""
    timeout_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Longest wait for an answer. Then the question is asked again."""
    max_retries: int = Field(default=6, ge=0)
    """Further tries after answers 408, 425, 429 and 5xx and lost connections; after those it counts as down."""
    backoff_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Wait before the first further try; doubled for each one after, up to a minute. Where the endpoint asks for a
    longer wait (Retry-After), that counts."""

    @model_validator(mode="after")
    def _body_leaves_the_rest_alone(self) -> JudgeEndpoint:
        refuse_decided("body", self.body)
        longest = self.body.get("max_completion_tokens", self.max_tokens)
        if type(longest) is not int or longest < 16:
            raise ValueError(f"body.max_completion_tokens is {longest!r}; expected a number of tokens, at least 16")
        if "max_completion_tokens" in self.body and self.api == "anthropic":
            raise ValueError("body.max_completion_tokens is a key of OpenAI's; set max_tokens of the judge")
        return self

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model} at {self.url}"

    @property
    def longest_answer(self) -> int:
        """Tokens that an answer may have."""
        return self.body.get("max_completion_tokens", self.max_tokens)

    def cache_identity(self) -> Any:
        """What decides an answer; keys, limits and prices do not."""
        return {
            "url": self.url,
            "api": self.api,
            "model": self.model,
            "revision": self.revision,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature if self.send_temperature else None,
            "guided": self.guided and self.api == "openai",
            "body": self.body,
        }


class JudgeScale(RewardSettings):
    """The numbers that a judge may give."""

    lowest: float = Field(default=0.0, allow_inf_nan=False)
    """Worst."""
    highest: float = Field(default=10.0, allow_inf_nan=False)
    """Best."""
    whole: bool = False
    """Whole numbers only."""
    normalise: bool = True
    """Make the lowest 0 and the highest 1. Else the reward is the number as it was given."""

    @model_validator(mode="after")
    def _in_order(self) -> JudgeScale:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest:g} and highest {self.highest:g}; give lowest < highest")
        return self

    def reward(self, given: float) -> float:
        """Of a number that a judge gave."""
        return (given - self.lowest) / (self.highest - self.lowest) if self.normalise else given


class JudgeReward(RewardSettings):
    """What models at endpoints say of a completion, by a rubric; no question is asked again whose answer is kept."""

    identity_without_default: ClassVar[frozenset[str]] = frozenset({"when_down", "when_unusable", "human_key"})

    kind: Literal["judge"] = "judge"
    judges: tuple[JudgeEndpoint, ...] = Field(min_length=1)
    """Who is asked. Several vote."""
    mode: Literal["score", "pairwise", "ranking"] = "score"
    """``score``: a number for each completion. ``pairwise``: 1 where it is better than the row's reference answer, 0
    where it is worse, 0.5 for a tie. ``ranking``: all completions of one prompt are shown together, and each gets a
    number relative to the others."""
    rubric: str = Field(default="How correct, complete and helpful is it?", min_length=1)
    """What is judged, and by what."""
    template: JinjaTemplate | None = None
    """The question in Jinja, in place of the built-in one: with ``prompt``, ``completion`` (``completions`` in a
    ranking, and in a pair), ``reference``, ``rubric``, ``lowest``, ``highest``, ``row`` and the keys of the prompt's
    row, which every row has to have, except ``{{ key | default('') }}``. How to answer is said in another message."""
    reference_key: str | None = Field(default=None, min_length=1)
    """Key of the prompt's row with a reference answer. Default: none is shown; ``pairwise`` needs one."""
    human_key: str | None = Field(default=None, min_length=1)
    """Key of the prompt's row with a person's judgement of the completion: with ``score`` a number of the scale, with
    ``pairwise`` what the person chose, ``completion``, ``reference`` or ``tie``. An evaluation then says how judge and
    people agree, on the rows that have it; it changes no score. Default: none is looked for."""
    scale: JudgeScale = JudgeScale()
    """Of ``score`` and ``ranking``."""
    vote: Literal["mean", "median", "majority"] = "mean"
    """What several judges come to: their mean, their median, or what most of them say (of equally many, the median)."""
    swap_order: bool = True
    """Ask ``pairwise`` and ``ranking`` in both orders and take the mean, for judges prefer what they read first."""
    when_down: Literal["wait", "fail", "abstain"] = "wait"
    """Where an endpoint gives no answer after all tries: try on until it does; fail, so that the run can be continued;
    or leave the completion without a score, and the others, too, once as many questions in a row as may be under way
    (and at least 8) got no answer. It is never a reward of 0."""
    when_unusable: Literal["abstain", "fail"] = "abstain"
    """Where an endpoint refuses a question and answers others, or its answer does not fit the schema after one question
    for repair: leave the completion without a score, or fail."""
    budget: TokenBudget | None = None
    """Most tokens and money of all judges together."""

    @model_validator(mode="after")
    def _fits_together(self) -> JudgeReward:
        if self.mode == "pairwise" and self.reference_key is None:
            raise ValueError('mode = "pairwise" compares with a reference answer; name its key as reference_key')
        if self.mode == "ranking" and self.human_key is not None:
            raise ValueError(
                'mode = "ranking" gives numbers relative to other completions, and a person judges one by itself; '
                "leave out human_key"
            )
        if len({judge.model_dump_json() for judge in self.judges}) < len(self.judges):
            raise ValueError("a judge is there twice; it would give the same answer again")
        self._check_template()
        for judge in self.judges:
            judge.refuse_unpriced(self.budget, judge.name)
        return self

    def _check_template(self) -> None:
        if self.template is None:
            return
        # In a pair that is asked about in both orders, ``completion`` is the reference answer at the second time.
        all_are_shown = self.mode == "ranking" or (self.mode == "pairwise" and self.swap_order)
        names = ("completions",) if all_are_shown else ("completion", "completions")
        if variables_of(self.template).isdisjoint(names):
            wanted = " or ".join(f"{{{{ {name} }}}}" for name in names)
            raise ValueError(f"the template does not show what mode = {self.mode!r} judges; expected {wanted} in it")

    def human_judgement(self, row: Mapping[str, Any]) -> float | None:
        """What a person says of a row's completion: a number of the scale, or of a pair 1, 0 or 0.5; None where the row
        does not say. Raises ConfigError for what is none of these."""
        value = None if self.human_key is None else row.get(self.human_key)
        if value is None:
            return None
        if self.mode == "pairwise":
            found, expected = (
                CHOICES.get(value) if isinstance(value, str) else None,
                "'completion', 'reference' or 'tie'",
            )
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            lowest, highest = self.scale.lowest, self.scale.highest
            found = float(value) if is_number and lowest <= value <= highest else None
            expected = f"a number from {lowest:g} to {highest:g}"
        if found is None:
            raise ConfigError(f"{self.human_key} is {shown(value)}; expected {expected}, as a person judges it")
        return found

    @property
    def row_keys(self) -> tuple[str, ...]:
        reference = () if self.reference_key is None else (self.reference_key,)
        named = frozenset() if self.template is None else required_variables(self.template)
        return tuple(dict.fromkeys((*reference, *sorted(named - {*GIVEN_NAMES}))))

    def cache_identity(self) -> Any:
        """What decides scores, and which completions have one; not what judging may cost."""
        fates = {name: getattr(self, name) for name in sorted(self.identity_without_default)}
        return {
            "kind": self.kind,
            "judges": [judge.cache_identity() for judge in self.judges],
            "mode": self.mode,
            "rubric": self.rubric,
            "template": self.template,
            "reference_key": self.reference_key,
            "scale": self.scale.model_dump(mode="json"),
            "vote": self.vote,
            "swap_order": self.swap_order and self.mode != "score",
            **{name: fate for name, fate in fates.items() if fate != type(self).model_fields[name].default},
        }
