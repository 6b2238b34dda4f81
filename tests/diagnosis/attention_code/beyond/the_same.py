# regard.check(nothing)
def nothing(x):
    return x
