"""What a ladder of small runs says of a large one: as text, and as a page for whoever pays."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from planning.ladder import Rung
from planning.scaling_laws import FAR, Law
from reports import charts
from reports import html as pages
from runtime import units

UNIT = "bits per byte"
ONE_SIDED = 0.01  # mean error of the largest runs, all to one side, that says that no law holds yet


# ------------------------------ as text ------------------------------


def ladder_text(rungs: Sequence[Rung], left_out: int) -> str:
  """Returns which runs a ladder has."""
  sizes = sorted({one.size.parameters for one in rungs})
  tokens = [one.tokens for one in rungs]
  total = sum(one.compute for one in rungs)
  short = f"; {left_out} of too few steps are left out" if left_out else ""
  return (
    f"ladder: {len(rungs)} runs of {len(sizes)} sizes, {sizes[0]:,} to {sizes[-1]:,} parameters, "
    f"and {min(tokens):,} to {max(tokens):,} tokens: {total:.3g} FLOPs in all{short}"
  )


def interval(found: Mapping[str, float], form: str = ".3f") -> str:
  """Returns `2.413 (2.398 to 2.431)`."""
  value, low, high = (format(found[key], form) for key in ("value", "low", "high"))
  return f"{value} ({low} to {high})"


def text(parts: Mapping[str, Any]) -> str:
  """Returns the law, its error on the largest runs, and the targets."""
  lines = [
    "",
    f"law: {UNIT} = E + A / parameters^alpha + B / tokens^beta; in brackets 90 % intervals",
    *(f"  {name:6} {interval(one, '.3g')}" for name, one in parts["coefficients"].items()),
    f"  runs differ from it by {100 * parts['noise']:.2f} % (standard deviation)",
    *held_out_lines(parts),
    *best_lines(parts),
  ]
  for one in parts["targets"]:
    train = [] if one["refused"] else [f"train it: {one['train']}"]
    rest = [*target_lines(one, parts), *doubts(one), *train]
    lines += ["", f"{one['title']}, for {parts['budget']}", *(f"  {line}" for line in rest)]
  return "\n".join(lines)


def held_out_lines(parts: Mapping[str, Any]) -> list[str]:
  """Returns the error on the largest runs, which another fit was made without."""
  if not parts["held_out"]:
    return ["no run can be left out of the fit to check it: train more sizes and tokens"]
  lines = ["the largest runs, predicted from the others:"]
  for one in parts["held_out"]:
    inside = "inside" if one["inside"] else "outside"
    lines.append(
      f"  {units.number(one['parameters'])} parameters, {units.number(one['tokens'])} tokens: "
      f"predicted {interval(one['predicted'])}, measured {one['measured']:.3f}: "
      f"{100 * one['error']:+.2f} %, {inside} the interval"
    )
  errors = np.array([one["error"] for one in parts["held_out"]])
  mean = errors.mean()
  if len(errors) >= 3 and (errors * mean > 0).all() and abs(mean) > ONE_SIDED:
    how = "low" if mean < 0 else "high"
    lines.append(
      f"  ALL TOO {how.upper()}, by {100 * abs(mean):.1f} % on average: the ladder's loss does "
      f"not follow a law yet, and a larger run is likely to be predicted too {how} as well, "
      "whatever the intervals say. Train the widest models on more tokens (larger --flops), and "
      "no width much below half the target's"
    )
  return lines


def best_lines(parts: Mapping[str, Any]) -> list[str]:
  """Returns the best learning rate and batch size at the targets, where they were swept."""
  lines = []
  for name, one in parts["best"].items():
    if "unknown" in one:
      lines.append(one["unknown"])
      continue
    of = zip(parts["targets"], one["at_targets"], strict=True)
    unit = " tokens" if name == "batch_size" else ""
    at = "; ".join(f"{target['title']}: {interval(value, '.3g')}{unit}" for target, value in of)
    lines.append(f"{name.replace('_', ' ')} by its power law: {at}")
  return lines


def target_lines(one: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
  """Returns what is said of a target besides its heading, doubts and the command that trains it."""
  line = (
    f"{units.number(one['parameters'])} parameters (width {one['width']:,}, {one['layers']} "
    f"layers), {units.number(one['tokens'])} tokens, {one['flops']:.3g} FLOPs"
  )
  if best := one["best_parameters"]:
    low, high = units.number(best["low"]), units.number(best["high"])
    line += f"; the best size is between {low} and {high} parameters"
  loss = {key: value * parts["nats_per_bit"] for key, value in one["bits_per_byte"].items()}
  said = f"{UNIT} {interval(one['bits_per_byte'])}, loss {interval(loss)} nats per token, on the"
  lines = [line, f"{said} evaluation split"]
  if one["epochs"] > 1:
    worth = units.number(one["effective_tokens"])
    lines.append(
      f"the data are seen {one['epochs']:.3g} times, which is worth {worth} tokens seen once"
    )
  if not one["extrapolated"]:
    times = units.number(one["times_largest"])
    lines.append(f"{times} times the compute of the largest run of the ladder")
  if one["served_tokens"]:
    lines.append(f"counting {units.number(one['served_tokens'])} tokens that it will serve")
  if one["plan"] and not one["refused"]:
    lines += plan_lines(one, parts)
  return lines


def doubts(one: Mapping[str, Any]) -> list[str]:
  """Returns that a prediction is too far beyond the ladder, and why a target cannot be trained."""
  far = (
    f"EXTRAPOLATED to {units.number(one['times_largest'])} times the compute of the largest run of "
    f"the ladder; beyond {FAR} times, no interval can be trusted"
  )
  return [*([far] if one["extrapolated"] else []), *filter(None, [one["refused"]])]


def plan_lines(one: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
  """Returns mesh, memory, time, cost and failures."""
  plan = one["plan"]
  step = plan["step_seconds"]
  used, limit = (plan[f"{name}_bytes_per_device"] for name in ("peak", "hbm"))
  how = "the compiler" if plan["compiled"] else "formula"
  cost = "" if one["cost"] is None else f", {money(one['cost'], parts)}"
  return [
    f"mesh {one['mesh']}, rematerialization {one['rematerialization']}; memory of a device "
    f"{units.size(used)} of {units.size(limit)}, by {how}",
    f"{plan['steps']:,} steps of {units.seconds(step['expected'])} ({units.seconds(step['low'])} "
    f"to {units.seconds(step['high'])}), MFU {100 * plan['mfu']:.0f} %: {hours(one['seconds'])} "
    f"with failures{cost}",
    *(line.strip() for line in one["failures"]),
  ]


def money(cost: float, parts: Mapping[str, Any]) -> str:
  """Returns `$2,000`."""
  return f"{parts['currency']}{cost:,.0f}" if cost >= 100 else f"{parts['currency']}{cost:,.2f}"


def hours(seconds: float) -> str:
  """Returns `11.6 h` or `12.1 days`."""
  return f"{seconds / 86_400:,.1f} days" if seconds > 172_800 else f"{seconds / 3600:,.2f} h"


# ------------------------------ as HTML ------------------------------


def html(parts: Mapping[str, Any]) -> str:
  """Returns the page."""
  return pages.render(
    "forecast.html.j2",
    title=f"Forecast: {parts['title']}",
    command=parts["command"],
    budget=parts["budget"],
    targets=[_card(one, parts) for one in parts["targets"]],
    coefficients=[[name, interval(one, ".3g")] for name, one in parts["coefficients"].items()],
    noise=f"{100 * parts['noise']:.2f} %",
    held_out=held_out_lines(parts),
    best=best_lines(parts),
    curves=curves(parts),
    runs=[
      [
        *(one["name"], f"{one['parameters']:,}", f"{one['tokens']:,}", f"{one['flops']:.3g}"),
        *(f"{one['bits_per_byte']:.4f}", f"{one['by_the_law']:.4f}"),
      ]
      for one in parts["runs"]
    ],
  )


def _card(one: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what the page shows of a target: its facts, and the sentence for whoever pays."""
  loss = one["bits_per_byte"]
  lead = (
    f"{units.number(one['parameters'])} parameters, trained on {units.number(one['tokens'])} "
    f"tokens: {loss['value']:.3f} {UNIT}, 90 % interval {loss['low']:.3f} to {loss['high']:.3f}"
  )
  if one["seconds"] is not None:
    lead += f"; {hours(one['seconds'])}"
  if one["cost"] is not None:
    lead += f", {money(one['cost'], parts)}"
  return {
    "title": one["title"],
    "lead": f"{lead}.",
    "doubt": ". ".join(doubts(one)),
    "lines": target_lines(one, parts),
    "train": "" if one["refused"] else one["train"],
  }


def curves(parts: Mapping[str, Any]) -> Markup:
  """Returns a drawing of bits per byte over compute: of each size, by the law, and predicted."""
  law = Law(**{name: one["value"] for name, one in parts["coefficients"].items()})
  by_size: dict[int, list[Mapping[str, Any]]] = {}
  for one in parts["runs"]:
    by_size.setdefault(one["parameters"], []).append(one)
  titles, unique = {}, parts["unique_tokens"] or math.inf
  with matplotlib.rc_context(charts.SETTINGS):
    figure = Figure(figsize=(charts.WIDE, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for number, (size, runs) in enumerate(sorted(by_size.items())):
      color = charts.SERIES[number % len(charts.SERIES)]
      flops = [one["flops"] for one in runs]
      many = np.geomspace(min(flops) / 1.5, max(flops) * 1.5, 40)
      axes.plot(many, law.loss(size, many / (6 * size), unique), color=color, linewidth=1.2)
      axes.plot(flops, [one["bits_per_byte"] for one in runs], "o", color=color, markersize=4)
      axes.annotate(
        units.number(size),
        (many[-1], float(law.loss(size, many[-1] / (6 * size), unique))),
        xytext=(3, 0),
        textcoords="offset points",
        color=color,
        va="center",
      )
    for number, one in enumerate(parts["targets"]):
      loss = one["bits_per_byte"]
      ends = [[loss["value"] - loss["low"]], [loss["high"] - loss["value"]]]
      axes.errorbar([one["flops"]], [loss["value"]], ends, fmt="none", ecolor=charts.ACCENT)
      axes.plot([one["flops"]], [loss["value"]], "D", color=charts.ACCENT, gid=f"target{number}")
      side = (-6, "right") if number % 2 else (6, "left")
      axes.annotate(
        one["title"],
        (one["flops"], loss["value"]),
        xytext=(side[0], 4),
        textcoords="offset points",
        ha=side[1],
        color=charts.ACCENT,
      )
      titles[f"target{number}"] = f"{one['title']}: {interval(loss)} {UNIT}"
    charts.plain_axes(axes, grid="both")
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of training")
    axes.set_ylabel(UNIT)
    axes.margins(x=0.12)
  return charts.for_page(figure, f"{UNIT} over compute", "law", titles)
