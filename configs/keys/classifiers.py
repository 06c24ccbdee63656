"""The section `model` of a multilayer perceptron and of a vision transformer."""

from configs.keys.row import ACCEPT, Key, Rows, Unset
from runtime.forms import MOST_LAYERS

MLP: Rows = {
  "name": Key("mlp", ""),
  "input_size": Key(Unset(int), "values per image", unit="values"),
  "model_size": Key(128, "width of the residual stream", unit="dims"),
  "feedforward_size": Key(Unset(int), "as model_size", unit="dims"),
  "base_width": Key(
    0,
    "muP: the width at which learning rates were tuned; 0: off",
    unit="dims",
    least=0,
  ),
  "output_size": Key(Unset(int), "classes", unit="classes"),
  "bias_standard_deviation": Key(0.0, "of initial biases", least=0),
}

VIT: Rows = {
  "name": Key("vit", ""),
  "input_size": Key(Unset(int), "values per image", unit="values"),
  "channels": Key(1, "of an image: 3 of a coloured one", unit="channels"),
  "image_size": Key(Unset(int), "pixels of a side; follows from input_size", unit="pixels"),
  "patch_size": Key(2, "pixels of a patch's side", unit="pixels"),
  "layers": Key(2, "transformer blocks", unit="layers", most=MOST_LAYERS),
  "model_size": Key(64, "width of the residual stream", unit="dims"),
  "feedforward_size": Key(256, "hidden width of the MLP", unit="dims"),
  "heads": Key(4, "query heads", unit="heads"),
  "norm_epsilon": Key(1e-06, "added to the variance", above=0),
  "dropout_rate": Key(0.2, "of the outputs of attention and MLP", resume=ACCEPT),
  "output_size": Key(Unset(int), "classes", unit="classes"),
}
