"""What every error of lensjax carries: what was found and expected (the message) and what to do (the hint)."""

from __future__ import annotations


class LensjaxError(Exception):
    """Base of all errors raised on purpose.

    `code` is a stable short word for machines, `hint` says what to do next. Both appear in `--json` output.
    """

    code = "error"

    def __init__(self, message: str, *, hint: str = "", code: str | None = None):
        super().__init__(message if not hint else f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code


class UnsupportedJax(LensjaxError):
    """The installed jax lacks something that lensjax drives."""

    code = "unsupported_jax"


class ClusterError(LensjaxError, ValueError):
    """A cluster description that cannot be read, or does not exist."""

    code = "cluster"


class TraceError(LensjaxError, ValueError):
    """The step could not be turned into a program."""

    code = "trace"


class BatchError(LensjaxError, ValueError):
    """Which arguments are the batch could not be found, or the batch does not fit the mesh."""

    code = "batch"


class StateError(LensjaxError, ValueError):
    """The state passed to a step is not the one that the step was planned for, or can no longer be used."""

    code = "state"


class PlanError(LensjaxError, ValueError):
    """A plan, preset or pin that does not apply."""

    code = "plan"


class DoesNotFit(PlanError):
    """No plan fits the memory of the devices."""

    code = "does_not_fit"


class PartitionError(LensjaxError, ValueError):
    """A program that the partitioner does not take."""

    code = "partition"


class CompileError(LensjaxError, RuntimeError):
    """A compile (for these devices or ahead of time for others) that failed, with what the compiler said."""

    code = "compile"


class OutOfMemory(LensjaxError, RuntimeError):
    """The device ran out of memory; says what the plan holds and which plan would fit."""

    code = "out_of_memory"


class CaptureWarning(UserWarning):
    """A step closes over an array that is large, or that has changed since the step was traced."""


class CodecError(LensjaxError, ValueError):
    """A codec that does not exist, a parameter that it does not take, or a value that cannot be reduced."""

    code = "codec"


class UsageError(LensjaxError, ValueError):
    """A command line that cannot be carried out as written."""

    code = "usage"


class ProcessError(LensjaxError, RuntimeError):
    """The processes of a run do not run the same program, or one of them is not there."""

    code = "processes"
