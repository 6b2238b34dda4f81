# regard.check(average_of_the_past, causal=True)
# regard.spec(causal=True)
def average_of_the_past(scores):
    past = scores.tril()  # <- mask-fill-value
    return past.softmax(-1)
