"""Checks options and folders before torch is imported, which takes seconds.

What a start can refuse without knowing the hardware is refused here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...compiler.artifacts.store import artifacts_having
from ...config import EngineOptions, UserError
from ...config.check import check_limits, check_options
from ...config.speculative import LOOKUP_METHODS, read_speculative
from ...config.weight_format import full_name
from ...model_executor.checkpoint import checkpoint_files
from ...model_executor.hf_config import model_folder, model_limits, read_spec
from ...model_executor.parallel import check_parallel
from ...model_executor.spec import ModelSpec, check_online_kind
from .generation_config import default_sampling
from .tokenizer import missing_tokenizer
from .tokenizer_files import given_chat_template


def check_start(options: EngineOptions, *, weights: bool = True) -> None:
    """Check options and the model's folder, as far as no hardware decides.

    Args:
        options: as for a start.
        weights: whether they will be read; their files must be there then.

    Raises:
        UserError: an option or a file is bad.
    """
    check_options(options)
    if not options.model:
        raise UserError("model='': expected a Hugging Face model folder, ORG/NAME, or abacus")
    weights = weights and options.load_format != "dummy"
    lookup = partial(artifacts_having, options)
    overrides = options.hf_overrides
    folder = model_folder(options.model, weights=weights, lookup=lookup, overrides=overrides)
    spec = read_spec(folder, options.model_impl, lookup, options.tensor_parallel_size)
    check_limits(options, model_limits(spec))
    kind = full_name(options.quantization)
    if spec.quant is None and kind is not None:
        check_online_kind(spec, kind)
    check_parallel(
        spec,
        options.tensor_parallel_size,
        expert_parallel=options.enable_expert_parallel,
        num_stages=options.pipeline_parallel_size,
        quantization=kind,
    )
    check_drafter(options, spec, weights=weights)
    default_sampling(options.model, options.generation_config)
    if options.tokenizer is not None:
        check_tokenizer(options)
    if options.chat_template is not None:
        check_chat_template(options.chat_template)
    if weights:
        checkpoint_files(folder)


def check_drafter(options: EngineOptions, spec: ModelSpec, *, weights: bool) -> None:
    """Refuse a draft model that is not there, lacks its weights, or cannot draft for ``spec``.

    Raises:
        UserError: says why.
    """
    asked = read_speculative(options.speculative_config)
    if asked is None or asked.method in LOOKUP_METHODS:
        return
    from ...model_executor import draft_checks

    lookup = partial(artifacts_having, options)
    spec = replace(spec, pipeline_parallel_size=options.pipeline_parallel_size)
    try:
        folder = model_folder(asked.model or options.model, weights=weights, lookup=lookup)
        draft = draft_checks.drafter_reader(asked.method, spec)(folder, options.model_impl, lookup)
        if weights:
            checkpoint_files(folder)
    except UserError as error:
        raise UserError(f"speculative_config: {error}") from error
    draft_checks.check_drafter(asked.method, folder, draft, spec)


def check_chat_template(template: str) -> None:
    """Refuse a chat template that the user gives and that is no file or does not compile.

    Raises:
        UserError: says why.
    """
    from .chat_template import ChatTemplate  # Jinja takes 0.1 s of a start

    ((source, origin),) = given_chat_template(template).values()
    ChatTemplate(source, {}, str(origin))


def check_tokenizer(options: EngineOptions) -> None:
    """Refuse a folder without ``tokenizer.json``; the model's has been checked otherwise.

    Raises:
        UserError: names what is missing.
    """
    if options.tokenizer is None:
        folder = model_folder(options.model)
        if not (folder / "tokenizer.json").is_file():
            raise missing_tokenizer(folder)
        return
    folder = model_folder(options.tokenizer)
    if not (folder / "tokenizer.json").is_file():
        what = "no tokenizer.json in it" if folder.is_dir() else "not a folder"
        raise UserError(
            f"tokenizer={options.tokenizer!r}: {what}; name a folder that has tokenizer.json"
        )
