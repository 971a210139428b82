"""Several models as one backend: one that answers, and drafts that score prompts for it.

One thread submits the steps of all, one after the other: two models that computed at once would take the
cores from each other, and no pacing could bound their steps.
"""

from dataclasses import replace

from backends.interface import Backend, BackendSpec, Batch, CodeState, Pending, PrefixArchive


class CompositeBackend:
    """`model` with `drafts`, whose pools follow its own."""

    def __init__(self, model: Backend, *drafts: Backend) -> None:
        self._backends = (model, *drafts)
        specs = tuple(draft.spec for draft in drafts)
        described = [f"draft: {spec.description}" for spec in specs if spec.description]
        description = "; ".join(filter(None, (model.spec.description, *described)))
        self._spec = replace(model.spec, drafts=specs, description=description)

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    @property
    def prefix_archive(self) -> PrefixArchive | None:
        """That of the model that answers: a draft's prompts are stored in memory only."""
        return self._backends[0].prefix_archive

    @property
    def code(self) -> CodeState:
        """That of the model that answers: a draft does not decode."""
        return self._backends[0].code

    def warmup(self) -> None:
        for backend in self._backends:
            backend.warmup()

    def use_idle_time(self) -> bool:
        return any(backend.use_idle_time() for backend in self._backends)

    def submit(self, batch: Batch) -> Pending:
        index, pool = self._spec.model_of(batch.pool)
        # Only the model that answers has slots to store. Its pools have the same numbers here.
        return self._backends[index].submit(batch if index == 0 else replace(batch, pool=pool))

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
