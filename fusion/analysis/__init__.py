"""Analyses of canonical values that are independent of any domain.

Lanes and rows
    lanes, lane_products                  sources of the entries of the last dim; entries as sums of products of these
    row_layout, repeated_entries          reshapes and permutes of rows; consecutively repeated entries
    stacked_entries, equal_rows           single entries of a dim; rows of one number, such as fully masked ones
Masks and positions
    mask_formulas, formula_decisions      masks as formulas over their positions; implication between formulas
    affine, affine_integers               comparisons of affine expressions; integers of a mask as such expressions
    list_masks, consecutive_positions     masks of the positions in a list; runs start, start + 1, ...
    number_formulas, infinities           tensors of a few different numbers; the infinities of masks
Numbers
    constant_folding, intervals           constants; bounds of integers
    lower_bounds, upper_bounds            positive lower bounds of floats; upper bounds of absolute values
    dtypes, rounding                      conversion and promotion of dtypes; casts, roundings and factors above a value
    rounded_before_use                    values whose users round them
    dequantised, factored_products        (n + offset) · scale; sums of scaled matrix products
Exponentials
    softmax_weights, logarithms           softmax weights of rows, and log Σ exp, as models write them
    softmax_shares, exp_monomials         weights over a few parts; normal form of rational expressions of exponentials
The user's graph
    node_predicates                       nodes of the model that compute or use a value
"""
