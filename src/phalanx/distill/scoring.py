"""Asks teachers for their scores of samples, and the student for its own at the teachers' tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.answers import JsonObject
from phalanx.distill.asking import (
    AskingSettings,
    OnSample,
    Route,
    affinity_of,
    each_sample,
    generate,
    ignore,
)
from phalanx.distill.checking import check_scores
from phalanx.distill.prefill import (
    ChosenIds,
    Prefill,
    PrefillScores,
    has_chosen,
    read_scores,
    scores_of_nothing,
)
from phalanx.distill.sample import Sample, TeacherScores, digest
from phalanx.distill.support import support_of
from phalanx.distill.token_table import TokenTable
from phalanx.errors import EngineUnavailableError, InvalidRequestError, ScoresMisalignedError
from phalanx.routing.roles.resolver import RoleSelector, choose_model


@dataclass(frozen=True)
class ScorerSettings:
    """`chosen`: how tokens are chosen position by position, see `ChosenIds`.

    `version` is that of the teacher's weights, where the caller knows it and discovery does not: an
    answer of another one is an error.
    """

    asking: AskingSettings = field(default_factory=AskingSettings)
    chosen: ChosenIds = ChosenIds.AUTO
    version: str | None = None


class TeacherScorer:
    """Scores samples at the teachers behind `client`, which may be a role or one engine.

    Every sample of a group goes to the same replica, where the role's policy is `affinity`, so that
    its prompt is computed once. Belongs to the event loop of `client`, which the caller closes.
    """

    def __init__(self, client: AsyncRoleClient, settings: ScorerSettings | None = None) -> None:
        self.settings = settings or ScorerSettings()
        self._prefills = _Prefills(client, self.settings)
        self._client = client

    async def score(self, samples: Sequence[Sample], on_sample: OnSample = ignore) -> list[Sample]:
        """Copies of the samples with `scores`, in their order; `on_sample` gets each new one.

        A sample that has scores of the same request and the same version of the teacher is not
        asked about again. All get scores of one version of their teacher: those of another one are
        asked for once more. Raises `ScoresMisalignedError` where an answer is not exactly what was
        asked for or the teacher's weights go on changing, and as `AsyncRoleClient.generate`.
        """
        for sample in samples:
            _check_request(sample)
        await look(self._client, self.settings.asking)

        concurrency = self.settings.asking.max_concurrency
        scored = await each_sample(samples, self._scored, on_sample, concurrency)
        if places := _of_other_versions(samples, scored):
            unscored = [msgspec.structs.replace(samples[at], scores=None) for at in places]
            again = await each_sample(unscored, self._scored, on_sample, concurrency)
            for at, sample in zip(places, again, strict=True):
                scored[at] = sample
            if _of_other_versions(samples, scored):
                raise ScoresMisalignedError(
                    "the weights of a teacher changed while it scored; score again when they stay"
                )
        return scored

    async def _scored(self, sample: Sample) -> Sample:
        request = sample.teacher
        assert request is not None
        route = Route(request.model, request.route_key, affinity_of(sample.group_id))
        version = self.settings.version or known_version(self._client, route)
        if _is_scored(sample, version):
            return sample
        topk = sample.student_topk
        chosen = topk.id_array if topk is not None and request.selection.of_student else None
        prefill = Prefill(
            sample.teacher_prompt_ids,
            sample.response_ids,
            request.top_k if request.selection.of_teacher else 0,
            chosen,
        )
        if sample.response_ids:
            found = await self._prefills.ask(sample, prefill, route)
        else:
            found = scores_of_nothing(prefill, version)
        if version is not None and found.version != version:
            raise ScoresMisalignedError(
                f"sample {sample.sample_id!r} was scored by version {found.version!r} of the"
                f" teacher, which is to be {version!r}"
            )
        scores = TeacherScores(
            asked=digest(sample),
            model=request.model or request.route_key,
            version=found.version,
            teacher_log_probs=found.log_probs,
            teacher_topk=found.topk,
            teacher_at_student_topk=found.chosen,
            support=support_of(request.selection, topk, found.topk, found.chosen, None),
        )
        scored = msgspec.structs.replace(sample, scores=scores)
        check_scores(scored, with_student=False)
        return scored


class StudentScorer:
    """Scores the student behind `client` at the teachers' tokens, under the weights that made the
    samples: an answer of any other version is an error.
    """

    def __init__(self, client: AsyncRoleClient, settings: ScorerSettings | None = None) -> None:
        self.settings = settings or ScorerSettings()
        self._prefills = _Prefills(client, self.settings)
        self._client = client

    async def score(
        self,
        samples: Sequence[Sample],
        on_sample: OnSample = ignore,
        *,
        model: str | None = None,
    ) -> list[Sample]:
        """Copies of the samples with `student_at_teacher_topk`, where they want it, in their order;
        `on_sample` gets each new one.
        """
        await look(self._client, self.settings.asking)
        act = partial(self._scored, model=model)
        return await each_sample(samples, act, on_sample, self.settings.asking.max_concurrency)

    async def _scored(self, sample: Sample, model: str | None) -> Sample:
        request, scores = sample.teacher, sample.scores
        if request is None or not request.needs_student:
            return sample
        if scores is None or scores.teacher_topk is None:
            raise ScoresMisalignedError(
                f"sample {sample.sample_id!r} has no teacher's tokens yet; score the teacher first"
            )
        if scores.student_at_teacher_topk is not None:
            return sample
        best = scores.teacher_topk
        # An empty response has the same table of nothing.
        at_teacher = await self._at(best, sample, model) if sample.response_ids else best
        support = support_of(
            request.selection,
            sample.student_topk,
            best,
            scores.teacher_at_student_topk,
            at_teacher,
        )
        scores = msgspec.structs.replace(
            scores, student_at_teacher_topk=at_teacher, support=support
        )
        scored = msgspec.structs.replace(sample, scores=scores)
        check_scores(scored)
        return scored

    async def _at(self, best: TokenTable, sample: Sample, model: str | None) -> TokenTable:
        """The student at the tokens of `best`."""
        route = Route(model, affinity=affinity_of(sample.group_id))
        version = _one_version(sample)
        self._check_version(sample, version, known_version(self._client, route))
        prefill = Prefill(sample.prompt_ids, sample.response_ids, 0, best.id_array)
        found = await self._prefills.ask(sample, prefill, route)
        self._check_version(sample, version, found.version)
        assert found.chosen is not None
        return found.chosen

    def _check_version(self, sample: Sample, wanted: str, found: str | None) -> None:
        if found is not None and found != wanted:
            raise ScoresMisalignedError(
                f"sample {sample.sample_id!r} was made by version {wanted!r} of the student, which is"
                f" {found!r} now; score it before new weights are pushed, or set rescores_student to"
                " false"
            )


class _Prefills:
    """Asks in the way that the server understands, which `auto` finds out once."""

    def __init__(self, client: AsyncRoleClient, settings: ScorerSettings) -> None:
        self._client = client
        self._asking = settings.asking
        self._chosen = settings.chosen

    async def ask(self, sample: Sample, prefill: Prefill, route: Route) -> PrefillScores:
        how = self._chosen
        try:
            if prefill.chosen is not None and how is ChosenIds.AUTO:
                return await self._by_either(prefill, route)
            return read_scores(prefill, await self._answers(prefill, route, how), how)
        except ScoresMisalignedError as error:
            raise ScoresMisalignedError(f"sample {sample.sample_id!r}: {error}") from error

    async def _by_either(self, prefill: Prefill, route: Route) -> PrefillScores:
        try:
            answers = await self._answers(prefill, route, ChosenIds.BY_POSITION)
        except InvalidRequestError as error:
            if error.field and "token_ids_logprob" not in error.field:
                raise
        else:
            if has_chosen(answers[0]):
                self._chosen = ChosenIds.BY_POSITION
                return read_scores(prefill, answers, ChosenIds.BY_POSITION)
        answers = await self._answers(prefill, route, ChosenIds.UNION)
        scores = read_scores(prefill, answers, ChosenIds.UNION)
        self._chosen = ChosenIds.UNION
        return scores

    async def _answers(self, prefill: Prefill, route: Route, how: ChosenIds) -> list[JsonObject]:
        is_union = prefill.chosen is not None and how is ChosenIds.UNION
        payloads = prefill.parts() if is_union else [prefill.payload(how)]
        return [
            await generate(self._client, payload, route, self._asking, harmless=True)
            for payload in payloads
        ]


async def look(client: AsyncRoleClient, asking: AskingSettings) -> None:
    """Ask discovery now, so that versions are not those of a moment ago. Where nobody answers, as
    while a gateway is started anew, it is asked until the role should be ready.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + asking.ready_timeout_s
    while not client.is_engine:
        try:
            await client.engines()
            return
        except EngineUnavailableError:
            if loop.time() >= end_s:
                raise
        await asyncio.sleep(client.settings.retry_s)


def known_version(client: AsyncRoleClient, route: Route) -> str | None:
    """The version that discovery tells of; None where it does not, or was not asked yet."""
    snapshot = client.snapshot
    if snapshot is None:
        return None
    return choose_model(snapshot, RoleSelector(route.model, route.route_key)).weight_version


def _check_request(sample: Sample) -> None:
    request = sample.teacher
    if request is None:
        raise InvalidRequestError(
            f"sample {sample.sample_id!r} has no TeacherRequest; say what its teacher is asked",
            field="teacher",
        )
    topk = sample.student_topk
    if request.selection.of_student and (topk is None or topk.width != request.top_k):
        found = "none" if topk is None else str(topk.width)
        raise InvalidRequestError(
            f"sample {sample.sample_id!r} is to be compared at the student's {request.top_k} likeliest"
            f" tokens, and has {found}; roll out with top_logprobs={request.top_k}",
            field="student_topk",
        )


def _is_scored(sample: Sample, version: str | None) -> bool:
    scores = sample.scores
    if scores is None or scores.asked != digest(sample):
        return False
    return version is None or scores.version is None or scores.version == version


def _of_other_versions(given: Sequence[Sample], scored: Sequence[Sample]) -> list[int]:
    """Places of samples whose teacher has scored others under newer weights; all of its samples
    where nobody can tell which are the newest.
    """
    versions: dict[str | None, dict[int, str]] = {}
    for at, sample in enumerate(scored):
        scores = sample.scores
        if scores is not None and scores.version is not None:
            versions.setdefault(scores.model, {})[at] = scores.version
    places: list[int] = []
    for found in versions.values():
        # What was not asked for now is the very sample that was given.
        now = {version for at, version in found.items() if scored[at] is not given[at]}
        newest = now.pop() if len(now) == 1 else None
        if len(set(found.values())) > 1:
            places += [at for at, version in found.items() if version != newest]
    return places


def _one_version(sample: Sample) -> str:
    versions = {version for version, _ in sample.weight_versions}
    if len(versions) != 1:
        raise ScoresMisalignedError(
            f"sample {sample.sample_id!r} was made by {len(versions)} versions of the student; only"
            " one of a single version can be scored again: set rescores_student to false"
        )
    return versions.pop()
