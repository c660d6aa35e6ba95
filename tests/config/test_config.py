"""Configuration: strict, with the nearest key; what enters cache keys and what does not; examples that load."""

import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, TypeAdapter

from rollout_core.base.errors import ConfigError
from rollout_core.config import (
    CONFIG_KINDS,
    EvalConfig,
    GKDSettings,
    GRPOAlgorithm,
    GRPOSettings,
    ImportanceCorrection,
    InferBatchConfig,
    NightlyConfig,
    OnlineDPOSettings,
    PPOSettings,
    RLOOSettings,
    Settings,
    SnapshotPolicy,
    TrainAgentConfig,
    TrainDPOConfig,
    TrainGRPOConfig,
    TrainIPOConfig,
    TrainKTOConfig,
    TrainPPOConfig,
    TrainRMConfig,
    TrainSFTConfig,
    VLLMBackend,
    apply_overrides,
    as_given,
    identity,
    json_schema,
    load_config,
    parse_config,
)
from rollout_core.config.described import field_docs
from rollout_core.config.kinds import SUITE_KINDS

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "nightly-suites.toml": NightlyConfig,
    "nightly-tiny.toml": NightlyConfig,
    "sft-tiny.toml": TrainSFTConfig,
    "ppo-tiny.toml": TrainPPOConfig,
    "grpo-tiny.toml": TrainGRPOConfig,
    "grpo-dask.toml": TrainGRPOConfig,
    "dapo-tiny.toml": TrainGRPOConfig,
    "replay-tiny.toml": TrainGRPOConfig,
    "gspo-tiny.toml": TrainGRPOConfig,
    "cispo-tiny.toml": TrainGRPOConfig,
    "online-dpo-tiny.toml": TrainGRPOConfig,
    "gkd-tiny.toml": TrainGRPOConfig,
    "layers-tiny.toml": TrainSFTConfig,
    "simpo-tiny.toml": TrainDPOConfig,
    "orpo-tiny.toml": TrainDPOConfig,
    "rm-tiny.toml": TrainRMConfig,
    "dpo-tiny.toml": TrainDPOConfig,
    "ipo-tiny.toml": TrainIPOConfig,
    "kto-tiny.toml": TrainKTOConfig,
    "batch-tiny.toml": InferBatchConfig,
    "eval-tiny.toml": EvalConfig,
    "batch-dask.toml": InferBatchConfig,
    "batch-many.toml": InferBatchConfig,
    "batch-parquet.toml": InferBatchConfig,
    "batch-s3.toml": InferBatchConfig,
    "batch-endpoint.toml": InferBatchConfig,
    "grpo-judge.toml": TrainGRPOConfig,
    "batch-guided.toml": InferBatchConfig,
}


def nightly_document() -> dict:
    return tomllib.loads((PROJECT / "examples" / "nightly-tiny.toml").read_text())


@pytest.mark.parametrize("name", sorted(path.name for path in (PROJECT / "examples").glob("*.toml")))
def test_every_shipped_example_loads(name):
    load_config(PROJECT / "examples" / name, EXAMPLES[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sft.optimzer": {}}, r"sft\.optimzer: unknown key; did you mean 'optimizer'\?"),
        ({"ppo.kl.targett": 1}, r"ppo\.kl\.targett: unknown key; did you mean 'target'\?"),
        ({"backend.max_num_seq": 1}, r"backend\.max_num_seq: unknown key; did you mean 'max_num_seqs'\?"),
        (
            {"environment": {"kind": "reasoning_gym", "dataset": "chain_sum", "path": "x"}},
            r"environment\.path: unknown key$",  # it is another kind's
        ),
        (
            {"environment": {"kind": "textarena", "gamee": "x"}},
            r"environment\.gamee: unknown key; did you mean 'game'\?",
        ),
        (
            {"environment": {"kind": "harbor", "dataset": "terminal-bench@2.0"}},
            r'environment: kind = "harbor": a task of Harbor .* no containers are started here, .* run harbor itself',
        ),
        ({"sft.optimizer.lr": 0}, r"sft\.optimizer\.lr: .*greater than 0; got 0"),
        ({"sft.optimizer.lr": float("nan")}, r"sft\.optimizer\.lr: "),
        ({"sft.minibatch_size": "many"}, r"sft\.minibatch_size: .*integer.*got 'many'"),
        ({"ppo.sampling.top_p": 0.5}, r"ppo: on-policy training needs samples of the policy itself"),
        ({"reward": {"kind": "exact"}}, r"reward\.kind: .*got 'exact'"),
        ({"run.name": "a/b"}, r"run\.name: "),
        ({"cost.per_gpu_hour": -1}, r"cost\.per_gpu_hour: .*greater than or equal to 0; got -1"),
        ({"cost.per_hour": float("inf")}, r"cost\.per_hour: .*finite number; got inf"),
        ({"cost.currency": "a b"}, r"cost\.currency: "),
        ({"schema_version": 2}, r"schema_version: .*got 2"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(nightly_document(), NightlyConfig, overrides=change)


def test_what_is_wrong_with_a_whole_table_is_said_of_its_key_alone():
    """The names by which pydantic tells validators apart are 600 characters of no use to anybody."""
    document = tomllib.loads((PROJECT / "examples" / "agents" / "train-lookup.toml").read_text())
    with pytest.raises(ConfigError, match=r"^--set: algorithm: samples_per_prompt is 1, but "):
        parse_config(document, TrainAgentConfig, overrides={"algorithm.samples_per_prompt": 1})


def test_a_missing_table_is_named():
    document = nightly_document()
    del document["sft"]["optimizer"]
    with pytest.raises(ConfigError, match=r"sft\.optimizer: required, but not given"):
        parse_config(document, NightlyConfig)


def test_all_violations_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse_config(nightly_document(), NightlyConfig, overrides={"sft.x": 1, "ppo.y": 2, "seed": -1})
    assert len(caught.value.violations) == 3


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "none.toml", NightlyConfig)
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml: not readable as TOML"):
        load_config(broken, NightlyConfig)


def test_overrides_change_one_value_and_leave_the_document_alone():
    document = nightly_document()
    config = parse_config(document, NightlyConfig, overrides={"ppo.iterations": 3})
    assert config.ppo.iterations == 3 and document == nightly_document()
    with pytest.raises(ConfigError, match="plain value"):
        apply_overrides(document, {"seed.x": 1})


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_was_given_is_parsed_to_the_same_again(name):
    config = load_config(PROJECT / "examples" / name, EXAMPLES[name])
    assert parse_config(as_given(config), EXAMPLES[name]) == config


GRPO = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("given", "change", "corrected"),
    [
        ({}, {"async_depth": 1}, True),
        ({}, {"lora": {"r": 4, "quantization": "nf4"}}, True),
        ({"async_depth": 1}, {"async_depth": 0}, False),
        ({"async_depth": 1, "correction": None}, {"kl_coef": 0.1}, False),
        ({"correction": {}, "async_depth": 1}, {"async_depth": 0}, True),
    ],
)
def test_a_default_that_follows_from_other_keys_follows_from_overrides_too(given, change, corrected):
    """The nightly flow takes overrides of a configuration that was parsed before."""
    config = parse_config({**GRPO, **given}, GRPOSettings)
    changed = parse_config(apply_overrides(as_given(config), change), GRPOSettings)
    assert (changed.correction is not None) == corrected
    assert changed == parse_config({**GRPO, **given, **change}, GRPOSettings)


SMALL_NIGHT = {
    "schema_version": 1,
    "model": {"uri": "m"},
    "sft": {"dataset": {"path": "x"}, "optimizer": {"lr": 1e-3}},
    "grpo": {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-3}},
    "evaluation": {"prompts": {"path": "x"}},
}


def test_a_table_of_which_some_keys_are_given_has_its_own_defaults_for_the_others():
    night = parse_config(SMALL_NIGHT, NightlyConfig)
    assert (night.run.name, night.evaluation.sampling.temperature) == ("nightly", 0.0)
    change = {"run.tags": ["x"], "evaluation.sampling.max_tokens": 64}
    for changed in (
        parse_config(SMALL_NIGHT, NightlyConfig, overrides=change),
        parse_config(apply_overrides(as_given(night), change), NightlyConfig),
    ):
        assert (changed.run.name, changed.run.tags) == ("nightly", ("x",))
        assert (changed.evaluation.sampling.temperature, changed.evaluation.sampling.max_tokens) == (0.0, 64)


def leaves(table: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_an_override_by_the_value_that_is_there_changes_nothing():
    """Whatever is overridden, all else stays as it is."""
    night = parse_config(SMALL_NIGHT, NightlyConfig)
    whole = night.model_dump(mode="json")
    for key, value in leaves(whole):
        if value is not None and value != []:
            changed = parse_config(apply_overrides(as_given(night), {key: value}), NightlyConfig)
            assert changed.model_dump(mode="json") == whole, key


def test_what_an_update_is_not_made_by_leaves_its_identity():
    """Bounds that end a run, and what becomes of samples that failed or groups that are short, which scores tell of."""
    plain = parse_config(GRPO, GRPOSettings)
    for change in (
        {"failed": "leave_out"},
        {"dynamic_sampling": {"when_short": "fewer"}},
        {"guards": {"max_mean_length": 5.0}},
        {"guards": {"reward_hacking": {"prompts": {"path": "y"}}}},
    ):
        assert identity(parse_config({**GRPO, **change}, GRPOSettings)) == identity(plain), change
    trained = {**GRPO, "base_model": {"uri": "m"}}
    other = {"reward": {"kind": "exact_match", "ignore_case": True}}
    same = [parse_config({**trained, **change}, GRPOAlgorithm) for change in ({}, other)]
    assert identity(same[0]) == identity(same[1])
    held = {**GRPO, "kl_coef": 0.1}
    one, two = (identity(parse_config({**held, "guards": {"max_kl": bound}}, GRPOSettings)) for bound in (1.0, 2.0))
    assert one == two != identity(parse_config(held, GRPOSettings)), "without a bound nobody has measured it"


def test_losses_that_weigh_no_advantages_have_no_correction_and_no_kl_to_guard():
    teacher = {"distillation": {"teacher": {"uri": "t"}}}
    for kind, more, model in (("gkd", teacher, GKDSettings), ("online_dpo", {}, OnlineDPOSettings)):
        quantized = {"lora": {"r": 4, "quantization": "nf4"}}
        assert identity(parse_config({**GRPO, **more, "kind": kind, **quantized}, model))["correction"] is None
        ahead = parse_config({**GRPO, **more, "kind": kind, "async_depth": 1}, model)
        assert identity(ahead)["correction"] == identity(ImportanceCorrection()), "keys have had it in them"
        assert model.model_validate(ahead.model_dump(mode="json")) == ahead, "as a record of a run has it"
        with pytest.raises(ConfigError, match=f'a KL that kind = "{kind}" does not compute'):
            parse_config({**GRPO, **more, "kind": kind, "guards": {"max_kl": 1.0}}, model)
        with pytest.raises(ConfigError, match=r"has no use for correction \(of grpo\)"):
            parse_config({**GRPO, **more, "kind": kind, "correction": {}}, model)


RLOO_KEYS = {
    "loss": "reinforce",
    "loss_type": "dr_grpo",
    "baseline": "leave_one_out",
    "advantage_scaling": "none",
    "kl_in": "reward",
    "kl_coef": 0.05,
}


@pytest.mark.parametrize("changes", [{}, {"kl_in": "loss"}, {"epochs": 2, "kl_coef": 0.2}])
def test_rloo_is_grpo_with_the_keys_of_its_paper_and_has_the_same_identity(changes: dict[str, Any]):
    spelled = parse_config({**GRPO, **RLOO_KEYS, **changes}, GRPOSettings)
    own = parse_config({**GRPO, "kind": "rloo", **changes}, RLOOSettings)
    assert (own.variant, own.family) == ("rloo", "grpo")
    assert identity(own) == identity(spelled)
    trained = {"base_model": {"uri": "m"}, **GRPO, **changes}
    runs = [
        parse_config({"algorithm": {**trained, **form}}, TrainGRPOConfig).algorithm
        for form in ({"kind": "grpo", **RLOO_KEYS, **changes}, {"kind": "rloo"})
    ]
    assert identity(runs[0]) == identity(runs[1])
    assert type(runs[1]).model_validate(runs[1].model_dump(mode="json")) == runs[1], "as a record of a run has it"


def test_rloo_without_a_kl_loads_no_reference_and_another_baseline_is_refused():
    own = parse_config({**GRPO, "kind": "rloo", "kl_coef": 0.0}, RLOOSettings)
    assert not own.loads_reference
    without = {**RLOO_KEYS, "kl_coef": 0.0, "kl_in": "loss"}
    same = parse_config({**GRPO, "kind": "rloo", "kl_coef": 0.0, "kl_in": "loss"}, RLOOSettings)
    assert identity(same) == identity(parse_config({**GRPO, **without}, GRPOSettings))
    with pytest.raises(ConfigError, match="'leave_one_out'"):
        parse_config({**GRPO, "kind": "rloo", "baseline": "none"}, RLOOSettings)
    with pytest.raises(ConfigError, match=r'kind = "gkd" has no use for kl_coef \(of grpo\)'):
        parse_config({**GRPO, "kind": "gkd", "kl_coef": 0.05, "distillation": {"teacher": {"uri": "t"}}}, GKDSettings)


def test_a_key_of_another_kind_of_algorithm_is_named_in_one_line_without_the_table():
    table = {**GRPO, "base_model": {"uri": "m"}, "kind": "grpo", "distillation": {"teacher": {"uri": "t"}}}
    with pytest.raises(ConfigError) as refused:
        parse_config({"algorithm": table}, TrainGRPOConfig)
    assert str(refused.value) == (
        'config: algorithm: kind = "grpo" has no use for distillation (of gkd); leave out what it does not know'
    )


FORMER_KEYS = {
    "distillation": None, "beta": 0.1, "loss_type": "grpo", "baseline": "group", "advantage_scaling": "group",
    "reward_normalization": "sum", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_in": "loss",
    "entropy_coef": 0.0, "dynamic_sampling": None, "dual_clip": None, "overlong": None, "missing_eos_penalty": 0.0,
    "replay": None, "max_tokens_per_microbatch": None,
}  # fmt: skip
"""Keys of GRPO before its losses gkd and online_dpo were kinds, at their defaults."""


@pytest.mark.parametrize(
    ("loss", "own"),
    [("gkd", {"distillation": {"teacher": {"uri": "t"}, "beta": 0.3}}), ("online_dpo", {"beta": 0.3})],
)
@pytest.mark.parametrize("table", ["grpo", "algorithm"])
def test_tables_of_the_time_when_kinds_were_losses_are_read_and_keep_their_identity(loss, own, table):
    """Written by hand, as a stage's record that names every key, and in the present form; in both places."""
    given = {**GRPO, "samples_per_prompt": 4}
    ahead = {"async_depth": 1, "correction": ImportanceCorrection().model_dump()}
    forms = [
        {**given, **own, "loss": loss},
        {**given, **FORMER_KEYS, **own, "loss": loss, "correction": None},
        {**given, **own, "kind": loss},
    ]
    if table == "algorithm":
        forms = [{**form, "base_model": {"uri": "m"}, "kind": form.get("kind", "grpo")} for form in forms]

    def read(form: dict[str, Any]) -> Any:
        if table == "algorithm":
            return parse_config({"algorithm": form}, TrainGRPOConfig).algorithm
        night = {name: value for name, value in nightly_document().items() if name != "ppo"}
        return parse_config({**night, "grpo": form}, NightlyConfig).grpo

    found = [read(form) for form in forms]
    assert found[0] == found[1] == found[2] and found[0].variant == loss and found[0].family == "grpo"
    assert read({**forms[1], **ahead}) == read({**forms[2], "async_depth": 1})
    named = identity(found[0])
    assert named["loss"] == loss and named.get("kind") == ("grpo" if table == "algorithm" else None)
    assert {name: named[name] for name in ("kl_coef", "loss_type", "clip_low", "dual_clip")} == {
        "kl_coef": 0.0, "loss_type": "grpo", "clip_low": 0.2, "dual_clip": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf'kind = "{loss}" has no use for kl_coef \(of grpo\)'):
        read({**forms[2], "kl_coef": 0.1})
    assert read({**forms[2], "kl_coef": 0.0}) == found[2], "what is at its default says nothing"
    plain = {name: value for name, value in forms[0].items() if name not in (*own, "loss")}
    assert read(plain) == read({**plain, "kind": "grpo"})
    schema = json_schema()["nightly" if table == "grpo" else "train-grpo"]["$defs"]
    former = schema["GRPOSettings" if table == "grpo" else "GRPOAlgorithm"]["properties"]
    assert former["beta"]["deprecated"] and former["distillation"]["default"] is None


def test_what_changes_speed_only_stays_out_of_the_identity():
    document = nightly_document()
    one = parse_config(document, NightlyConfig)
    other = parse_config(document, NightlyConfig, overrides={"backend.max_num_seqs": 8, "ppo.snapshots.every_steps": 1})
    assert identity(one.ppo) == identity(other.ppo) and identity(one.backend) == identity(other.backend)
    assert identity(VLLMBackend(dtype="bfloat16")) != identity(VLLMBackend())
    assert identity(SnapshotPolicy(every_steps=1)) is None


def test_what_changes_results_is_in_the_identity():
    settings = parse_config(nightly_document(), NightlyConfig).ppo
    for change in ({"clip": 0.3}, {"epochs": 3}, {"minibatch_size": 3}, {"lam": 0.9}):
        assert identity(settings.model_copy(update=change)) != identity(settings)
    assert isinstance(settings, PPOSettings)


def test_more_iterations_leave_the_earlier_ones_cached_unless_a_schedule_spans_them():
    document = nightly_document()
    for schedule, same in (("constant", True), ("linear", False), ("cosine", False)):
        two, three = (
            parse_config(
                document,
                NightlyConfig,
                overrides={"ppo.optimizer.schedule": schedule, "ppo.iterations": iterations},
            ).ppo
            for iterations in (2, 3)
        )
        assert (identity(two) == identity(three)) is same, schedule


def test_an_iterations_defaults_are_those_of_the_papers_they_name():
    """DeepSeekMath makes one step of 1,024 completions, InstructGPT 8 of 64 from 512 prompts."""
    common = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-6}}
    ppo, grpo = PPOSettings.model_validate(common), GRPOSettings.model_validate(common)
    for settings, completions, steps in ((grpo, 1024, 1), (ppo, 512, 8)):
        assert settings.prompts_per_iteration * settings.samples_per_prompt == completions
        assert settings.minibatch_size * settings.gradient_accumulation == completions // steps
        assert (settings.epochs, settings.steps_per_iteration) == (1, steps)
    assert ppo.kl.target == 6.0, "nats per sequence"


@pytest.mark.parametrize(("settings", "clip"), [(PPOSettings, "clip"), (GRPOSettings, "clip_high")])
def test_a_dual_clip_within_the_clip_range_is_refused(settings, clip):
    document = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-6}, "dual_clip": 1.5}
    assert settings.model_validate(document).dual_clip == 1.5
    with pytest.raises(ConfigError, match=rf"dual_clip is 1\.5, within the clip range; expected .* 1 \+ {clip} = 1\.5"):
        parse_config({**document, clip: 0.5}, settings)
    with pytest.raises(ConfigError, match="dual_clip: Input should be greater than 1"):
        parse_config({**document, "dual_clip": 1.0}, settings)


def test_identity_refuses_what_is_no_small_value():
    with pytest.raises(ConfigError, match="has no identity"):
        identity({"path": Path("x")})


class Pool(Settings):
    """A model as those of the configuration."""

    size: int = 1
    """Machines
    at most."""
    name: str = Field(default="cpu", description="as it is given")
    """Not this."""
    bare: int = 0


class OwnPool(Pool):
    size: int = 2
    depth: int = 0
    """How deep."""


def test_fields_are_described_by_the_string_below_them_or_that_of_the_class_they_come_from():
    assert field_docs(OwnPool) == {"size": "Machines\nat most.", "name": "Not this.", "depth": "How deep."}
    shown = {name: field.get("description") for name, field in OwnPool.model_json_schema()["properties"].items()}
    assert shown == {"size": "Machines\nat most.", "name": "as it is given", "bare": None, "depth": "How deep."}
    inner = TypeAdapter(dict[str, OwnPool]).json_schema()["$defs"]["OwnPool"]["properties"]
    assert inner["depth"]["description"] == "How deep.", "also where it is a part of another schema"


def test_no_source_is_read_while_a_class_is_made(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("every process would read it")

    monkeypatch.setattr(inspect, "findsource", refuse)

    class Other(Settings):
        size: int = 1
        """Machines."""

    monkeypatch.undo()
    assert field_docs(Other) == {"size": "Machines."}, "but when somebody asks"


def test_a_class_whose_source_is_not_to_be_had_has_no_descriptions():
    names: dict = {"Settings": Settings, "__name__": "nowhere"}
    exec('class Lost(Settings):\n    size: int = 1\n    """Machines."""', names)
    assert field_docs(names["Lost"]) == {}
    assert "description" not in names["Lost"].model_json_schema()["properties"]["size"]


def test_the_schema_covers_every_kind_of_run_with_descriptions():
    schema = json_schema()
    assert set(schema) == {*CONFIG_KINDS, *SUITE_KINDS}
    assert schema["nightly"]["$defs"]["PPOSettings"]["properties"]["clip"]["description"]
    # Plain unions: the run form of the Prefect UI shows them as tabs.
    assert "anyOf" in schema["nightly"]["properties"]["backend"]
