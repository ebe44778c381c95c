"""Turn a dense Llama checkpoint into one that waits less for communication under tensor parallelism.

The commands as functions; docs/python.md shows each. ``import ladderize`` imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladderize.adapt.blockwise.documents import Distillation
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
    from ladderize.adapt.blockwise.run import adapt_blocks
    from ladderize.adapt.data.sources import data_sources
    from ladderize.adapt.lora.config import LoraOptions
    from ladderize.adapt.merge.run import MergeReport, merge
    from ladderize.adapt.retrain.adaptation import Adaptation
    from ladderize.adapt.retrain.losses import Objective
    from ladderize.adapt.retrain.options import RetrainOptions
    from ladderize.adapt.retrain.run import adapt_checkpoint
    from ladderize.adapt.retrain.schedule import Budget
    from ladderize.console import SILENT, Console
    from ladderize.convert.inspection import InspectionReport, inspect_checkpoint
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.plan import ConversionReport
    from ladderize.convert.point_sensitivity import PointSensitivity, read_point_sensitivity
    from ladderize.convert.recipe import Recipe, read_recipe
    from ladderize.convert.sensitivity_file import SensitivityDocument
    from ladderize.errors import LadderizeError, UsageError, UserError
    from ladderize.eval.evaluation.run import evaluate
    from ladderize.eval.options import EvalOptions, PointOptions, SensitivityOptions
    from ladderize.eval.paired.compare import compare
    from ladderize.eval.paired.document import CompareOptions, ComparisonDocument, Comparisons
    from ladderize.eval.results import EvalResults
    from ladderize.layout import Layout, LayoutError
    from ladderize.modeling import load, load_tokenizer, register
    from ladderize.planning.calibration.document import CalibrationDocument
    from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
    from ladderize.planning.calibration.run import calibrate
    from ladderize.planning.plans.document import PlanResult
    from ladderize.planning.plans.options import PlanGoal, PlanModel, PlanOptions
    from ladderize.planning.plans.run import plan
    from ladderize.runtime.bench.document import BenchDocument
    from ladderize.runtime.bench.options import BenchOptions, ModelChoice
    from ladderize.runtime.bench.run import bench
    from ladderize.runtime.bench.training.document import TrainingBenchDocument
    from ladderize.runtime.bench.training.options import TrainingBenchOptions
    from ladderize.runtime.bench.training.run import bench_training
    from ladderize.runtime.sampling import Sampling
    from ladderize.runtime.schedule import Schedule
    from ladderize.runtime.texts.answers import AnswersDocument, answer_prompts
    from ladderize.runtime.texts.corpus import CorpusDocument, sample_corpus
    from ladderize.runtime.texts.options import GenerateOptions
    from ladderize.runtime.texts.prompts import GenerateDocument, generate
    from ladderize.tradeoff.report.options import ReportOptions
    from ladderize.tradeoff.report.run import ReportSummary, report
    from ladderize.tradeoff.sweep.run import sweep
    from ladderize.workflows.sensitivity import measure_points, measure_sensitivity
    from ladderize.workflows.sensitivity_run import write_points, write_sensitivity
    from ladderize.workflows.spd import SpdOptions, spd
    from ladderize.workflows.spd_document import SpdDocument
    from ladderize.workflows.sweep_document import SweepDocument

__version__ = "0.1.0"
__all__ = [
    "SILENT",
    "Adaptation",
    "AnswersDocument",
    "BenchDocument",
    "BenchOptions",
    "BlockwiseOptions",
    "Budget",
    "CalibrateOptions",
    "CalibrationDocument",
    "CompareOptions",
    "ComparisonDocument",
    "Comparisons",
    "Console",
    "ConversionReport",
    "CorpusDocument",
    "DistillOptions",
    "Distillation",
    "EvalOptions",
    "EvalResults",
    "GenerateDocument",
    "GenerateOptions",
    "InspectionReport",
    "LadderizeError",
    "Layout",
    "LayoutError",
    "LoraOptions",
    "MergeReport",
    "ModelChoice",
    "Objective",
    "PlanGoal",
    "PlanModel",
    "PlanOptions",
    "PlanResult",
    "PointOptions",
    "PointSensitivity",
    "Recipe",
    "ReportOptions",
    "ReportSummary",
    "RetrainOptions",
    "Sampling",
    "Schedule",
    "SensitivityDocument",
    "SensitivityOptions",
    "SpdDocument",
    "SpdOptions",
    "SweepDocument",
    "TimingsOptions",
    "TrainingBenchDocument",
    "TrainingBenchOptions",
    "UsageError",
    "UserError",
    "__version__",
    "adapt_blocks",
    "adapt_checkpoint",
    "answer_prompts",
    "bench",
    "bench_training",
    "calibrate",
    "compare",
    "convert_checkpoint",
    "data_sources",
    "evaluate",
    "generate",
    "inspect_checkpoint",
    "load",
    "load_tokenizer",
    "measure_points",
    "measure_sensitivity",
    "merge",
    "plan",
    "read_point_sensitivity",
    "read_recipe",
    "register",
    "report",
    "sample_corpus",
    "spd",
    "sweep",
    "write_points",
    "write_sensitivity",
]
# home -> public names; tests/test_api.py compares them with the imports above, which type checkers read
_HOMES = {
    "adapt.blockwise.documents": ("Distillation",),
    "adapt.blockwise.options": ("BlockwiseOptions", "DistillOptions"),
    "adapt.blockwise.run": ("adapt_blocks",),
    "adapt.data.sources": ("data_sources",),
    "adapt.lora.config": ("LoraOptions",),
    "adapt.merge.run": ("MergeReport", "merge"),
    "adapt.retrain.adaptation": ("Adaptation",),
    "adapt.retrain.losses": ("Objective",),
    "adapt.retrain.options": ("RetrainOptions",),
    "adapt.retrain.run": ("adapt_checkpoint",),
    "adapt.retrain.schedule": ("Budget",),
    "console": ("Console", "SILENT"),
    "convert.inspection": ("InspectionReport", "inspect_checkpoint"),
    "convert.pipeline": ("convert_checkpoint",),
    "convert.point_sensitivity": ("PointSensitivity", "read_point_sensitivity"),
    "convert.recipe": ("Recipe", "read_recipe"),
    "convert.plan": ("ConversionReport",),
    "convert.sensitivity_file": ("SensitivityDocument",),
    "errors": ("LadderizeError", "UsageError", "UserError"),
    "eval.evaluation.run": ("evaluate",),
    "eval.options": ("EvalOptions", "PointOptions", "SensitivityOptions"),
    "eval.paired.document": ("CompareOptions", "ComparisonDocument", "Comparisons"),
    "eval.paired.compare": ("compare",),
    "eval.results": ("EvalResults",),
    "layout": ("Layout", "LayoutError"),
    "modeling": ("load", "load_tokenizer", "register"),
    "planning.plans.document": ("PlanResult",),
    "planning.plans.options": ("PlanGoal", "PlanModel", "PlanOptions"),
    "planning.plans.run": ("plan",),
    "planning.calibration.document": ("CalibrationDocument",),
    "planning.calibration.options": ("CalibrateOptions", "TimingsOptions"),
    "planning.calibration.run": ("calibrate",),
    "runtime.bench.document": ("BenchDocument",),
    "runtime.bench.options": ("BenchOptions", "ModelChoice"),
    "runtime.bench.run": ("bench",),
    "runtime.bench.training.document": ("TrainingBenchDocument",),
    "runtime.bench.training.options": ("TrainingBenchOptions",),
    "runtime.bench.training.run": ("bench_training",),
    "runtime.sampling": ("Sampling",),
    "runtime.schedule": ("Schedule",),
    "runtime.texts.answers": ("AnswersDocument", "answer_prompts"),
    "runtime.texts.corpus": ("CorpusDocument", "sample_corpus"),
    "runtime.texts.options": ("GenerateOptions",),
    "runtime.texts.prompts": ("GenerateDocument", "generate"),
    "tradeoff.report.options": ("ReportOptions",),
    "tradeoff.report.run": ("ReportSummary", "report"),
    "tradeoff.sweep.run": ("sweep",),
    "workflows.sensitivity": ("measure_points", "measure_sensitivity"),
    "workflows.sensitivity_run": ("write_points", "write_sensitivity"),
    "workflows.spd": ("SpdOptions", "spd"),
    "workflows.spd_document": ("SpdDocument",),
    "workflows.sweep_document": ("SweepDocument",),
}
_HOME_OF = {name: f"ladderize.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
