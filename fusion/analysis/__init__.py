"""Decisions about canonical values that know no domain: lanes, row layouts, masks as formulas, intervals, constants.

lanes, lane_products            what entries of the last dim are made of; sums of (lane of x) · (lane of a table)
row_layout, repetition          how rows come out of reshapes and permutes; entries that stand several times
predicates, integers            a mask as a formula over its own positions, and integers as affine expressions of them
affine, extents                 such expressions and formulas, and which imply which others
intervals, floors, infinities   between which numbers an element lies; which may be infinite
magnitudes                      which number of a float no element passes
constant_folding, few_numbers   what depends on no input; tensors of few numbers
exponentials, logarithms        softmax, sigmoid, log Σ exp, as models write them
equal_rows                      what comes of a row of one number, as of scores that a mask hides
exp_monomials, elements         shares as products of exponentials; one entry of a dim, told from the others
int8_grids, factored_products   floats that are (n + offset) · scale of int8 n; products and their scales
rounding, rounded_later         casts, roundings and factors above a number; what is rounded only later
lists, runs                     lists that are compared with positions; positions that count by one
dtypes, nodes                   what dtypes hold; which nodes of the model hold a value
"""
