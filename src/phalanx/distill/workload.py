"""The work of a rollout: answers to prompts, their grades, and the batch that they go to.

Requests to roles are all that it makes. It starts, wakes, drains and stops nothing: whoever has the
phases does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.answers import JsonObject
from phalanx.distill.answer_part import AnswerPart, joined_spans
from phalanx.distill.asking import (
    OnSample,
    Route,
    affinity_of,
    each,
    each_sample,
    generate,
    ignore,
)
from phalanx.distill.judging import verdict
from phalanx.distill.rollout import Grading, Prompt, RolloutSettings, checked_reward
from phalanx.distill.sample import Sample
from phalanx.distill.token_table import TokenTable
from phalanx.errors import ConfigurationError, InvalidRequestError, RequestFailedError


class RolloutWorkload:
    """Generates at the role behind `rollout` and has samples graded by the one behind `judge`.

    Belongs to the event loop of its clients, which the caller closes.
    """

    def __init__(
        self,
        rollout: AsyncRoleClient,
        settings: RolloutSettings,
        *,
        judge: AsyncRoleClient | None = None,
        grading: Grading | None = None,
    ) -> None:
        if (judge is None) != (grading is None):
            raise ConfigurationError("give judge and grading together, or neither")
        self.settings = settings
        self._rollout = rollout
        self._judge = judge
        self._grading = grading

    async def generate(
        self,
        prompts: Sequence[Prompt],
        batch_id: str,
        *,
        have: Mapping[str, Sample] | None = None,
        on_sample: OnSample = ignore,
        weight_version: str | None = None,
    ) -> list[Sample]:
        """`num_samples` samples of each prompt, group after group in the order of the prompts.

        Those that `have` holds by their id, of the same prompt, with as many `top_logprobs`, and of
        the weights that have to answer, are not asked for again. `weight_version` is their version,
        where it is not that of the settings. `on_sample` gets each new one as it is there. A request
        that never started is sent again, and an answer that was cut off goes on where it stopped; one
        that got lost is an error, after all that run have come to their end.
        """
        version = weight_version or self.settings.weight_version
        known = have or {}
        _check_groups(prompts)

        async def one(job: tuple[Prompt, int]) -> Sample:
            prompt, index = job
            sample_id = f"{prompt.group_id}/{index}"
            kept = known.get(sample_id)
            if kept is not None and self._is_of(kept, prompt, version):
                return kept
            sample = await self._answer(prompt, index, batch_id, version)
            await on_sample(sample)
            return sample

        jobs = [(prompt, at) for prompt in prompts for at in range(self.settings.num_samples)]
        return await each(jobs, one, self.settings.asking.max_concurrency)

    async def evaluate(
        self, samples: Sequence[Sample], on_sample: OnSample = ignore
    ) -> list[Sample]:
        """Copies of the samples with the judge's `verdict` and their `reward`, in their order;
        `on_sample` gets each new one. One that has a reward is not judged again.
        """
        judge, grading = self._judge, self._grading
        if judge is None or grading is None:
            raise ConfigurationError("this workload has no judge; give judge and grading")

        async def one(sample: Sample) -> Sample:
            if sample.reward is not None:
                return sample
            said = await verdict(judge, grading, sample)
            try:
                worth = grading.reward(said, sample)
            except Exception as error:
                error.add_note(
                    f"reward() of sample {sample.sample_id!r}: the judge said {said!r:.200}"
                )
                raise
            reward = checked_reward(worth, sample.sample_id, said)
            return msgspec.structs.replace(sample, verdict=said, reward=reward)

        return await each_sample(samples, one, on_sample, grading.asking.max_concurrency)

    async def _answer(
        self, prompt: Prompt, index: int, batch_id: str, version: str | None
    ) -> Sample:
        """The whole answer, in as many parts as it is cut into."""
        settings, sample_id = self.settings, f"{prompt.group_id}/{index}"
        parts: list[AnswerPart] = []
        while True:
            tokens = [token for part in parts for token in part.token_ids]
            payload = self._payload(prompt, parts, tokens)
            payload["sampling_params"] = {
                **settings.sampling,
                "max_new_tokens": settings.max_new_tokens - len(tokens),
                "sampling_seed": settings.seed_of(batch_id, prompt.group_id, index, len(tokens)),
            }
            route = Route(settings.model, affinity=affinity_of(prompt.group_id))
            answer = await generate(self._rollout, payload, route, settings.asking)
            part = AnswerPart.read(answer, settings.top_logprobs)
            _check_version(sample_id, part, version)
            if not (parts or prompt.input_ids or part.prompt_ids):
                raise RequestFailedError(
                    f"sample {sample_id!r}: the answer has no prompt_token_ids, and nobody else knows"
                    " which tokens its text is; give the prompt's input_ids, or ask an engine that"
                    " knows return_prompt_token_ids (a router may drop it)"
                )
            parts.append(part)
            is_whole = part.finish_reason != "abort"
            if is_whole or len(tokens) + len(part.token_ids) >= settings.max_new_tokens:
                return self._sample(prompt, index, sample_id, batch_id, parts)
            if len(parts) > settings.max_continuations:
                raise RequestFailedError(
                    f"sample {sample_id!r} was cut off {len(parts)} times, after"
                    f" {len(tokens) + len(part.token_ids)} tokens; raise max_continuations, or pause"
                    " less often"
                )

    def _is_of(self, sample: Sample, prompt: Prompt, version: str | None) -> bool:
        """Whether it can stand for an answer to the prompt."""
        if prompt.input_ids is not None and sample.prompt_ids != prompt.input_ids:
            return False
        width = 0 if sample.student_topk is None else sample.student_topk.width
        if self.settings.top_logprobs not in (0, width):
            return False
        return version is None or {one for one, _ in sample.weight_versions} <= {version}

    def _payload(
        self, prompt: Prompt, parts: Sequence[AnswerPart], tokens: Sequence[int]
    ) -> JsonObject:
        payload: JsonObject = {"return_logprob": True, **prompt.fields}
        if self.settings.top_logprobs:
            payload["top_logprobs_num"] = self.settings.top_logprobs
        if parts:
            before = prompt.input_ids or parts[0].prompt_ids
            payload.pop("text", None)
            payload["input_ids"] = [*before, *tokens]
        return payload

    def _sample(
        self,
        prompt: Prompt,
        index: int,
        sample_id: str,
        batch_id: str,
        parts: Sequence[AnswerPart],
    ) -> Sample:
        top_ids = [row for part in parts for row in part.top_ids]
        top_scores = [row for part in parts for row in part.top_log_probs]
        width = self.settings.top_logprobs
        last = parts[-1].finish_reason
        return Sample(
            sample_id=sample_id,
            group_id=prompt.group_id,
            index=index,
            prompt_ids=prompt.input_ids or parts[0].prompt_ids,
            response_ids=tuple(token for part in parts for token in part.token_ids),
            rollout_log_probs=tuple(value for part in parts for value in part.log_probs),
            weight_versions=joined_spans(parts),
            finish_reason="length" if last == "abort" else last,
            seed=self.settings.seed_of(batch_id, prompt.group_id, index),
            text="".join(part.text for part in parts),
            student_topk=TokenTable.of(top_ids, top_scores, width) if width else None,
            metadata=dict(prompt.metadata),
            teacher=prompt.teacher,
        )


def _check_version(sample_id: str, part: AnswerPart, wanted: str | None) -> None:
    found = {version for version, _ in part.weight_versions}
    if wanted is not None and found - {wanted}:
        raise RequestFailedError(
            f"sample {sample_id!r} was made by version {', '.join(sorted(found))} of the student;"
            f" version {wanted} has to answer"
        )


def _check_groups(prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.group_id in seen:
            raise InvalidRequestError(
                f"group_id {prompt.group_id!r} is given twice; every prompt needs its own",
                field="group_id",
            )
        seen.add(prompt.group_id)
