"""The choice of `packshift tune` as code to paste into a training script."""

from __future__ import annotations

import json
from dataclasses import dataclass

from packshift.forecast_results import Configuration


@dataclass(frozen=True)
class Opening:
    """How a dataset is opened: the name to import from packshift, and the call."""

    name: str
    call: str


def opening_of(path: str, size: tuple[int, int] | None, fit: str) -> Opening:
    """That of a store, or of a folder of pictures where `size` is given."""
    quoted = json.dumps(path, ensure_ascii=False)
    if size is None:
        return Opening("open_dataset", f"open_dataset({quoted})")
    options = f"size={size!r}" + ("" if fit == "crop" else f', fit="{fit}"')
    return Opening("ImageFolderDataset", f"ImageFolderDataset({quoted}, {options})")


def code_of(
    configuration: Configuration, accumulation_steps: int, opening: Opening | None, collate_fn: bool = False
) -> str:
    """The loader, and where several batches make one step of the optimizer, the loop for that.

    `opening` None: the dataset is the user's own, who calls it `dataset`, and a `collate_fn` by that name.
    """
    lines = [*_imports(configuration, opening), ""]
    if opening is not None:
        lines.append(f"dataset = {opening.call}")
    if configuration.start_method not in (None, "fork"):
        lines.append(
            '# In a script this belongs below `if __name__ == "__main__":`, since the workers import the script.'
        )
    lines += _loader(configuration, collate_fn)
    if accumulation_steps > 1:
        lines += _loop(configuration.batch_size, accumulation_steps)
    return "\n".join(lines) + "\n"


def _imports(configuration: Configuration, opening: Opening | None) -> list[str]:
    ours = [] if opening is None else [opening.name]
    if configuration.loader == "threads":
        ours = sorted(["Loader", *ours])
    lines = [f"from packshift import {', '.join(ours)}"] if ours else []
    return lines if configuration.loader == "threads" else ["from torch.utils.data import DataLoader", *lines]


def _loader(configuration: Configuration, collate_fn: bool) -> list[str]:
    arguments = ["dataset", f"batch_size={configuration.batch_size}", "shuffle=True"]
    if configuration.loader == "threads":
        arguments += [f"threads={configuration.num_workers}", f"prefetch={configuration.prefetch_factor}"]
    else:
        arguments.append(f"num_workers={configuration.num_workers}")
        if configuration.num_workers:
            arguments += [f"prefetch_factor={configuration.prefetch_factor}", "persistent_workers=True"]
            if configuration.start_method is not None:
                arguments.append(f'multiprocessing_context="{configuration.start_method}"')
        if collate_fn:
            arguments.append("collate_fn=collate_fn")
    arguments.append(f"pin_memory={configuration.pin_memory}")
    name = "Loader" if configuration.loader == "threads" else "DataLoader"
    return [f"loader = {name}(", *(f"    {argument}," for argument in arguments), ")"]


def _loop(batch_size: int, steps: int) -> list[str]:
    """An epoch. Each batch's mean loss weighs as many samples as it has among those of its step, so that gradients are
    those of the mean over the step, also where the last batch is smaller and the last step has fewer batches."""
    return f"""
# One epoch: up to {steps} batches of {batch_size} make one step of the optimizer. `criterion` gives the mean over a batch.
left = len(dataset)
for number, (images, labels) in enumerate(loader):
    if number % {steps} == 0:
        step_samples = min({batch_size * steps}, left)
        optimizer.zero_grad()
    loss = criterion(model(images), labels) * (len(images) / step_samples)
    loss.backward()
    left -= len(images)
    if number % {steps} == {steps - 1} or left == 0:
        optimizer.step()""".splitlines()
