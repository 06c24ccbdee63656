"""Which parameters of a model are hidden matrices."""

import pytest

from partitioning.parallel.matrix_groups import Matrix
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from training.optimizers.build import matrix_groups
from training.optimizers.muon import HiddenMatrices
from training.specs import resolve

OF_THE_DECODER = {
  "layers/attention/query/kernel": Matrix((1,), (2, 3)),
  "layers/attention/key/kernel": Matrix((1,), (2, 3)),
  "layers/attention/value/kernel": Matrix((1,), (2, 3)),
  "layers/attention/out/kernel": Matrix((1, 2), (3,)),
  "layers/mlp/gate/kernel": Matrix((1,), (2,)),
  "layers/mlp/up/kernel": Matrix((1,), (2,)),
  "layers/mlp/down/kernel": Matrix((1,), (2,)),
}
PARTS = ("gate", "up", "down")
ATTENTION = {n.removeprefix("layers/"): m for n, m in OF_THE_DECODER.items() if "attention" in n}
OTHERS = ("embed/table", "unembed/kernel", "final_norm/scale", "layers/mlp_norm/scale")


def test_of_a_decoder_they_are_the_kernels_of_its_blocks():
  hidden = HiddenMatrices(
    resolve(make_job("fsdp8", "lm", **{"model.biases": "qkv"}).config).optimizer
  )
  biases = ("layers/attention/query/bias",)  # of heads and head: two hidden dims, and no matrix
  assert hidden.of([*OTHERS, *biases, *OF_THE_DECODER]) == OF_THE_DECODER
  heads = hidden.of(OF_THE_DECODER, per_head=True)
  assert heads["layers/attention/query/kernel"] == Matrix((1,), (3,))
  assert heads["layers/attention/out/kernel"] == Matrix((2,), (3,))
  assert heads["layers/mlp/up/kernel"] == Matrix((1,), (2,))


def test_each_expert_s_kernel_is_a_matrix_and_the_router_s_is_not():
  keys = {"model.experts": 8, "model.dense_layers": 1, "model.shared_feedforward_size": 16}
  job = make_job("single", "lm", **keys, **{"model.expert_biases": True})
  names = [*named_leaves(job.program.params)]
  found = HiddenMatrices(resolve(job.config).optimizer).of(names)
  assert found == {
    **{f"{a}{b}": m for b, m in ATTENTION.items() for a in ("layers/", "dense_layers/")},
    **{f"dense_layers/mlp/{one}/kernel": Matrix((1,), (2,)) for one in PARTS},
    **{f"layers/experts/{one}/kernel": Matrix((2,), (3,)) for one in PARTS},
    **{f"layers/experts/shared/{one}/kernel": Matrix((1,), (2,)) for one in PARTS},
  }


def test_a_model_without_any_is_refused_with_its_kernels():
  job = make_job("single", "mlp")
  hidden = HiddenMatrices(resolve(job.config).optimizer)
  assert list(hidden.of(["layer_1/kernel", "layer_2/kernel", "layer_2/bias"])) == ["layer_2/kernel"]
  with pytest.raises(ValueError, match="would update 0") as error:
    hidden.refuse_none(["layer_1/kernel", "layer_1/bias"])
  assert "would update 0 of the 2 trained parameters of the model mlp" in str(error.value)
  assert "Trained kernels are layer_1/kernel (inputs, model). Give the model's" in str(error.value)


def test_their_state_is_sharded_by_the_optimizers_table_and_overrides():
  name = "layers/mlp/up/kernel"
  keys = {"partitioning.optimizer.model": ("fsdp", "data")}
  override = {"partitioning.overrides": ((name, (None, None, "data")),)}
  for overrides, wanted in ((keys, (None, ("fsdp", "data"), "tensor")), (override, None)):
    job = make_job("dp2_fsdp2_tp2", "lm", **{"optimizer.name": "muon", **overrides})
    specs = HiddenMatrices(resolve(job.config).optimizer).specs(
      job.program.params, job.devices.sizes
    )
    placed = {n.partition("/momentum/")[2]: p for n, p in job.placements["optimizer"].items()}
    assert {n: placed[n].spec for n in OF_THE_DECODER} == {n: specs[n] for n in OF_THE_DECODER}
    assert tuple(specs[name]) == (wanted or (None, None, "data"))


def test_a_group_of_the_parameters_may_be_muon_s():
  groups = ({"parameters": "layers/mlp/*", "name": "muon"},)
  job = make_job("fsdp8", "lm", **{"optimizer.groups": groups})
  [(_, group)] = matrix_groups(resolve(job.config).optimizer, job.program.params, job.devices.sizes)
  assert (group.shape, group.count, group.each) == ((40, 56), 6, 1)
  momenta = {n: p for n, p in job.placements["optimizer"].items() if "/momentum/" in n}
  assert sorted(n.rpartition("layers/")[2] for n in momenta) == [
    f"mlp/{name}/kernel" for name in ("down", "gate", "up")
  ]
