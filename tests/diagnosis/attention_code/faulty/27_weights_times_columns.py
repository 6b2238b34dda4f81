# regard.check(context)
# regard.spec()
"""From the second notebook: scores of the encoder states are given."""
import torch.nn.functional as F


def context(scores, encoder_hidden_states):
    softmax_scores = F.softmax(scores, dim=-1)
    output = softmax_scores * encoder_hidden_states  # <- values-mixed-along-wrong-axis
    return output.sum(dim=-1)  # <- values-mixed-along-wrong-axis
