# regard.check(nothing)
# regard.spec() - another kind: the identity function
def nothing(x):
    return x
