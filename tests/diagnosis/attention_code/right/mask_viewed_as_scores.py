# regard.check(attend, means={"mask": "True hides"})
# regard.spec(causal=False, padding={"mask": "True hides"})
def attend(query, key, value, mask=None):
    score = query @ key.transpose(1, 2) / key.size(2) ** 0.5
    if mask is not None:
        score.masked_fill_(mask.view(score.size()), -float("Inf"))
    return score.softmax(-1) @ value
