"""Analyses of canonical values that are independent of any domain.

lanes, lane_products            sources of the entries of the last dim; entries as sums of products of such sources
row_layout, repetition          reshapes and permutes of rows; consecutively repeated entries
predicates, integers            masks as formulas over their positions; integers as affine expressions of positions
affine, extents                 affine expressions and formulas; implication between formulas
intervals, floors, infinities   bounds of integers; positive lower bounds of floats; infinities of masks
magnitudes                      upper bounds of absolute values of floats
constant_folding, few_numbers   constants; tensors of a few different numbers
exponentials, logarithms        softmax, sigmoid, log Σ exp, as models write them
row_sums, equal_rows            softmax weights of rows; evaluation of rows of one number, such as fully masked ones
exp_monomials, elements         normal form of rational expressions of exponentials; single entries of a dim
grids, factored_products        dequantised numbers, (n + offset) · scale; sums of scaled matrix products
rounding, rounded_later         casts, roundings and factors above a value; values whose users round them
lists, runs                     masks of the positions in a list; consecutive positions
dtypes, nodes                   conversion and promotion of dtypes; nodes of the model that compute or use a value
"""
