"""What can be asked of a step: its plan, program, compiled form and state, and what was thought on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from lensjax._errors import PlanError
from lensjax.execute.executable import Executable
from lensjax.execute.local import from_local
from lensjax.execute.place import device_mesh
from lensjax.execute.planning import Options, cluster_for
from lensjax.execute.state import abstract_state
from lensjax.passes.shardings import resolve
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.search.choose import Choice

if TYPE_CHECKING:
    from lensjax.verify.proof import Proof


class Planned:
    """A step that may have a plan. `notices`: what its user should know."""

    _fn: Callable[..., Any]
    _options: Options
    _run: Executable | None
    _program: Program | None
    _choice: Choice | None
    _agreed: set[Any]
    notices: list[str]

    def _build(self, program: Program) -> Executable:
        raise NotImplementedError

    def _analyze(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        raise NotImplementedError

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """The plan. Raises PlanError before there is one."""
        return self._planned().plan

    @property
    def choice(self) -> Choice:
        """The plan and everything it was compared with."""
        return self._planned()

    @property
    def program(self) -> Program:
        """The program that was planned."""
        self._planned()
        assert self._program is not None
        return self._program

    def _planned(self) -> Choice:
        if self._choice is None:
            raise PlanError(
                "there is no plan yet",
                hint="call the step, step.init(create_state, ..., batch=batch), or "
                "step.plan_for(state_shapes, batch_shapes)",
            )
        return self._choice

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program (compiles it when it is not yet)."""
        return self._executable().compiled

    def verify(self, *, backend: str | None = None, time_limit: float = 600.0) -> Proof:
        """The plan's proof: compiled by the cluster's own compiler, which needs none of its devices, and compared with
        what was planned. `print(step.verify())` shows it. Raises CompileError, PlanError before there is a plan."""
        from lensjax.verify.proof import prove, twice_the_batch

        cluster = cluster_for(self._options.cluster)
        again = twice_the_batch(self.program, self._fn)
        return prove(self.program, self.plan, cluster, backend=backend, again=again, time_limit=time_limit)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """StableHLO of the planned step on the devices that are there: of the step as it runs, or for arguments (arrays
        or ShapeDtypeStructs), for which it is planned where it has no plan yet."""
        if args or kwargs:
            return self._build(self._analyze(*self._taken(args, kwargs))).lowered
        return self._executable().lowered

    def _executable(self) -> Executable:
        """The step as it runs; before the first call, as that call will run it: what is compiled here is kept."""
        if self._run is not None:
            return self._run
        if self._ahead is None or self._ahead[0] is not self.program:
            self._ahead = (self.program, self._build(self.program))
        return self._ahead[1]

    @property
    def abstract_state(self) -> Any:
        """The state arguments as ShapeDtypeStructs with shardings: what a checkpoint is restored into. One tree where
        the state is one argument, else a tuple of them."""
        return abstract_state(self.program, self.plan, device_mesh(self.plan.mesh))

    def from_local(self, batch: Any) -> Any:
        """The global batch from this process's part of it (every leaf: the process's rows along the batch dimension).

        With one process it places the batch. Raises BatchError when the parts do not make up the planned batch.
        """
        program, plan = self.program, self.plan
        specs = resolve(program, plan).arguments
        members = [(a, spec) for a, spec in zip(program.arguments, specs) if a.role == "batch"]
        return from_local(batch, members, device_mesh(plan.mesh), self._agreed)

    def export(self, form: str) -> str:
        """The planned step for a world without lensjax, as the text of a file: "python" (a module that needs jax only,
        with specs, constraints by line, and the step itself), "flax-rules" or "json". Raises PlanError for a plan that
        shardings alone do not express, or a step that no file can hold."""
        from lensjax.execute.export import facts
        from lensjax.plan.export import write

        if form not in ("python", "json"):
            return write(self.plan, form)
        mesh = device_mesh(self.plan.mesh) if form == "python" else None
        return write(self.plan, form, facts(self.program, self.plan, getattr(self._fn, "__name__", "step"), mesh))

    def explain(self, path: str | None = None) -> str:
        """What was chosen, against every preset, and why: a text with a table. With the path of a tensor
        ("params/layer/mlp/kernel"): why that one is split so, and what each other way would cost."""
        from lensjax.report.explain import explain, render

        if path is None:
            return explain(self.program, self.choice, self.notices)
        from lensjax.report.explain_tensor import explain_tensor

        return render(explain_tensor(self.program, self.choice, path))

    def what_if(self, plan: Any) -> Any:
        """Another plan (`step.plan.replace(...)`) with its prediction, by the scorer that chose this one."""
        return self.choice.what_if(plan)

    def explain_trace(self) -> str:
        """What each argument was taken for."""
        from lensjax.report.explain import explain_trace

        return explain_trace(self.program)
