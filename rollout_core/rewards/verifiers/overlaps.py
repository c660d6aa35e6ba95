"""How much of an answer overlaps with the row's: BLEU and chrF of a sentence by sacrebleu (arXiv:1804.08771), ROUGE-L
by rouge-score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import sentence_bleu, sentence_chrf

from rollout_core.config.verifiers import TextReward
from rollout_core.rewards.verifiers.extraction import extract
from rollout_core.rewards.verifiers.texts import references_of

_ROUGE = RougeScorer(["rougeL"], use_stemmer=False)


def overlap_reward(spec: TextReward, completion: str, extras: Mapping[str, Any]) -> float:
    """From 0 to 1. Raises ConfigError for a row's answer that is no text."""
    references = references_of(spec, extras)
    answer = extract(completion, spec.extract)
    if answer is None:
        return 0.0
    if spec.compare == "bleu":
        # Its order is that of the shorter text, or sacrebleu warns on each call that BLEU of one sentence means little.
        return sentence_bleu(answer, references, use_effective_order=True).score / 100
    if spec.compare == "chrf":
        return sentence_chrf(answer, references).score / 100
    return float(_ROUGE.score_multi(references, answer)["rougeL"].fmeasure)
