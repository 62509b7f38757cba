"""Programs that went wrong once, as small as they were found; each push runs a share of them for all targets."""

from __future__ import annotations

from dataclasses import dataclass

from .program import Input, Program


@dataclass(frozen=True)
class Kept:
    """One program.

    Attributes:
        name: what it does.
        why: what went wrong.
        program: as it was printed.
        door: by which door; "" for the backend.
    """

    name: str
    why: str
    program: Program
    door: str = ""


KEPT = (
    Kept(
        "two equal rotations",
        "one was computed, and returned twice: a write to one result showed in the other",
        Program(
            inputs=(
                Input("q", ("B", "S", 2, 64)),
                Input("cos", ("S", 64)),
                Input("sin", ("S", 64)),
            ),
            lines=(
                "a, b = q.chunk(2, dim=-1)",
                "y = q * cos + torch.cat((-b, a), -1) * sin",
                "z = torch.cat((-b, a), -1) * sin + cos * q",
            ),
            results=("y", "z"),
            sizes=(("B", 1), ("S", 1)),
        ),
    ),
    Kept(
        "a scatter that fills its base",
        "it became a view of what it took",
        Program(
            inputs=(
                Input("x", ("B", "S", 64)),
                Input("cache", ("B", 1, 16, 64)),
                Input("rows", ("B", 1, "S", 64)),
            ),
            lines=(
                "y = torch.select_scatter(torch.zeros_like(x), x[0], 0, 0)",
                "cache.index_copy_(2, torch.arange(rows.shape[2]), rows)",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 1)),
        ),
    ),
    Kept(
        "a gate over turned rows",
        "the result lay in another order",
        Program(
            inputs=(Input("x", ("T", 256), layout="transposed"),),
            lines=("g, u = torch.chunk(x, 2, -1)", "y = g / (1 + torch.exp(-g)) * u"),
            results=("y",),
            sizes=(("T", 2),),
        ),
    ),
    Kept(
        "scores cut off to whole numbers",
        "attention read through the cast",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 64)),
                Input("k", ("B", 2, "S", 64)),
                Input("v", ("B", 2, "S", 64)),
            ),
            lines=(
                "scores = (q @ k.mT).int()",
                "y = scores.float().softmax(-1) @ v",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
        ),
    ),
    Kept(
        "a factor without dims times numbers of rows",
        "canonicalisation raised",
        Program(
            inputs=(Input("x", ("B", 1)), Input("t", ())),
            lines=("y = t * x",),
            results=("y",),
            sizes=(("B", 3),),
        ),
    ),
    Kept(
        "a batch of no sequences",
        "attention was planned with a division by the batch",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 64)),
                Input("k", ("B", 2, "S", 64)),
                Input("v", ("B", 2, "S", 64)),
            ),
            lines=("y = torch.softmax(q @ k.mT * 0.125, -1) @ v",),
            results=("y",),
            sizes=(("B", 0), ("S", 3)),
        ),
    ),
    Kept(
        "a write of positions that are computed behind it",
        "the write was put before what it reads, and no graph came out",
        Program(
            inputs=(
                Input("cache", ("B", 16, 2, 128)),
                Input("x", ("B", "S", 2, 128)),
                Input("start", (), values="below 3"),
                Input("other", ("B", 2, 16, 64)),
                Input("rows", ("B", 2, 64)),
                Input("length", ("B",), values="below 16"),
                Input("last", ("B", 1, 16, 64)),
            ),
            lines=(
                "cache[:, torch.arange(x.shape[1]) + start] = x",
                "other[torch.arange(other.shape[0]), :, length] = rows",
                "last[:, :, 1:1] = length",
            ),
            results=("rows.view(rows.shape)",),
            sizes=(("B", 1), ("S", 1)),
        ),
    ),
    Kept(
        "queries that are NaN",
        "attention gave 0 for them",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 64)),
                Input("k", ("B", 2, "S", 64)),
                Input("v", ("B", 2, "S", 64)),
            ),
            lines=("y = torch.softmax((q / 0) @ k.mT * 0.125, -1) @ v",),
            results=("y",),
            sizes=(("B", 1), ("S", 3)),
        ),
    ),
    Kept(
        "rows divided by a scale that was cast to whole numbers",
        "the scale was read below the cast, and rows were quantised by other numbers",
        Program(
            inputs=(
                Input("x", ("T", 128), values="rows"),
                Input("w", (128, 128), values="int8"),
                Input("channels", (128,), values="scale"),
            ),
            lines=(
                "rows = w.float()",
                "scale = (torch.max(torch.abs(rows), dim=-1, keepdim=True)[0] / 127.0).to(torch.int8)",
                "whole = torch.round(rows / scale).to(torch.int8)",
                "y = (whole.float() @ w.float() * scale * channels).to(x.dtype)",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 1), ("T", 1)),
            dtype="float16",
        ),
    ),
    Kept(
        "heads of one sequence joined by a copy that is not needed any more",
        "the view of the copy was made of the heads as they had lain before, which no view can be",
        Program(
            inputs=(
                Input("q", ("B", 4, "S", 128)),
                Input("k", ("B", 2, "S", 128)),
                Input("v", ("B", 2, "S", 128)),
            ),
            lines=(
                "keys = k.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)",
                "values = v[:, :, None].expand(-1, -1, 2, -1, -1).reshape(v.shape[0], -1, *v.shape[2:])",
                "shares = torch.softmax(torch.einsum('bhsd,bhtd->bhst', q, keys), dim=-1)",
                "y = (shares @ values).transpose(1, 2).reshape(q.shape[0], -1, 512)",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2), ("T", 1)),
        ),
    ),
    Kept(
        "scores that are multiplied by 0",
        "the operator was told a scale of 0, by which what the mask hides became NaN",
        Program(
            inputs=(
                Input("q", ("B", 1, "S", 64)),
                Input("v", ("B", 1, "S", 64)),
            ),
            lines=(
                "seen = torch.arange(q.shape[-2]) <= torch.arange(q.shape[-2])[:, None]",
                "scores = (q * 0.0 @ q.mT).masked_fill(~seen, torch.finfo(q.dtype).min)",
                "y = torch.softmax(scores, dim=-1) @ v",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2), ("T", 1)),
        ),
    ),
    Kept(
        "as many heads as positions, heads last",
        "keys whose heads stand behind positions were read as if they stood before them",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 24)),
                Input("latent", ("B", "S", 32)),
                Input("rope", ("B", "S", 8)),
                Input("up", (64, 32), values="matrix"),
            ),
            lines=(
                "keys, values = (latent @ up.t()).unflatten(-1, (2, 32)).split((16, 16), dim=-1)",
                "nope, turned = q.split((16, 8), -1)",
                "p = (nope @ keys.mT + turned @ rope.mT).softmax(-1)",
                "y = (p @ values).transpose(1, 2).flatten(2)",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
        ),
    ),
    Kept(
        "two attentions of the same queries over one latent",
        "queries that one had absorbed into its projection were read by the other",
        Program(
            inputs=(
                Input("q", ("B", 4, "S", 24)),
                Input("latent", ("B", "S", 32)),
                Input("rope", ("B", "S", 8)),
                Input("up", (128, 32), values="matrix"),
                Input("other", (128, 32), values="matrix"),
            ),
            lines=(
                "a, b = F.linear(latent, up).unflatten(-1, (4, 32)).transpose(1, 2).split((16, 16), dim=-1)",
                "c, d = F.linear(latent, other).unflatten(-1, (4, 32)).transpose(1, 2).split((16, 16), dim=-1)",
                "turned = rope[:, None].expand(-1, 4, -1, -1)",
                "y = F.scaled_dot_product_attention(q, torch.cat((a, turned), dim=-1), b, is_causal=True)",
                "z = F.scaled_dot_product_attention(q, torch.cat((c, turned), dim=-1), d, is_causal=True)",
            ),
            results=("y", "z"),
            sizes=(("B", 1), ("S", 2)),
        ),
    ),
    Kept(
        "one row of scores that a mask makes several",
        "its queries were taken for as many as the mask has rows, and planning raised",
        Program(
            inputs=(
                Input("q", ("T", 128)),
                Input("k", ("B", 1, "S", 128)),
                Input("v", ("B", 1, "S", 128)),
            ),
            lines=(
                "seen = torch.arange(k.shape[2]) <= torch.arange(k.shape[2])[:, None]",
                "scores = q @ k.mT * 0.125 + torch.zeros(seen.shape, dtype=k.dtype).masked_fill(~seen, -math.inf)",
                "y = F.softmax(scores, -1) @ v",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2), ("T", 1)),
        ),
    ),
    Kept(
        "grouped heads of which there are none",
        "canonicalising divided by their number",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 128)),
                Input("k", ("B", 1, "S", 128)),
                Input("v", ("T", 1, 128)),
            ),
            lines=("y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)",),
            results=("y",),
            sizes=(("B", 1), ("S", 1), ("T", 0)),
        ),
    ),
    Kept(
        "a rotation of which one product is in double",
        "both were computed in the narrow dtype of what they are made of",
        Program(
            inputs=(
                Input("q", ("B", "S", 2, 64)),
                Input("cos", ("B", "S", 64)),
                Input("sin", ("B", "S", 64)),
            ),
            lines=("y = torch.cat((-q[..., 32:], q[..., :32]), dim=-1) * sin.double() + cos * q",),
            results=("y",),
            sizes=(("B", 1), ("S", 1)),
            dtype="float16",
        ),
    ),
    Kept(
        "a rotation of which one half is cut to whole numbers",
        "casts were taken for roundings, those to integers too",
        Program(
            inputs=(
                Input("x", ("B", 4, "S", 64)),
                Input("cos", ("B", "S", 32)),
                Input("sin", ("B", "S", 32)),
            ),
            lines=(
                "a, b = x.unflatten(-1, (-1, 2)).unbind(-1)",
                "y = torch.cat((a * cos - b * sin, (a * sin + b * cos).to(torch.int16)), dim=-1)",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 1)),
        ),
    ),
    Kept(
        "rows that a scatter casts",
        "they were written in their own dtype, which no operator takes",
        Program(
            inputs=(
                Input("cache", ("B", 2, 16, 128), dtype="float16"),
                Input("rows", ("B", 2, "S", 128)),
            ),
            lines=(
                "cache.copy_(torch.slice_scatter(cache, rows, 2, 0, rows.shape[2]))",
                "other = torch.select_scatter(cache, rows[:, 0], 1, 1) if rows.shape[2] == 16 else cache + 1",
            ),
            results=("other",),
            sizes=(("B", 1), ("S", 1)),
        ),
    ),
    Kept(
        "a result in padded lanes, and a view of it",
        "the first was copied into memory that lies as it did, the view stayed with what the operator gives",
        Program(
            inputs=(
                Input("q", ("B", 2, 1, 24)),
                Input("k", ("B", 2, 5, 24)),
                Input("v", ("B", 2, 5, 16)),
                Input("seen", ("B", 1, 1, 5), values="bool"),
            ),
            lines=("o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)", "flat = o.reshape(-1)"),
            results=("o", "flat"),
            sizes=(("B", 1),),
            dtype="bfloat16",
        ),
    ),
    Kept(
        "four layers that compute the same",
        "the copies that keep their results apart were one for the layers in the middle",
        Program(
            inputs=(Input("q", ("B", 2, 3, 16)), Input("v", ("B", 2, 3, 16))),
            lines=(
                "a = (q @ q.mT * 0.25).softmax(-1) @ v",
                "b = (q @ q.mT * 0.25).softmax(-1) @ v",
                "c = (q @ q.mT * 0.25).softmax(-1) @ v",
                "d = (q @ q.mT * 0.25).softmax(-1) @ v",
            ),
            results=("a", "b", "c", "d"),
            sizes=(("B", 2),),
        ),
    ),
    Kept(
        "four layers that write the same rows into pages of their own",
        "two layers are written by one call, which was repeated as if each layer were written with the one before",
        Program(
            inputs=(
                Input("rows", (2, 1, 128)),
                Input("slots", (2,), values="distinct 32"),
                Input("a", (8, 4, 1, 128)),
                Input("b", (8, 4, 1, 128)),
                Input("c", (8, 4, 1, 128)),
                Input("d", (8, 4, 1, 128)),
            ),
            lines=(
                "a[slots // 4, slots % 4] = rows",
                "p = a[:, :1].contiguous()",
                "b[slots // 4, slots % 4] = rows",
                "q = b[:, :1].contiguous()",
                "c[slots // 4, slots % 4] = rows",
                "r = c[:, :1].contiguous()",
                "d[slots // 4, slots % 4] = rows",
                "s = d[:, :1].contiguous()",
            ),
            results=("p", "q", "r", "s"),
        ),
    ),
    Kept(
        "a number divided by whole numbers",
        "the number was asked for its dtype",
        Program(
            inputs=(Input("x", ("B", 64)), Input("n", ("B",), values="below 12")),
            lines=("y = x + (16 // (n + 1))[:, None]",),
            results=("y",),
            sizes=(("B", 2),),
        ),
    ),
    Kept(
        "scores below zero, and a causal order",
        "torch's causal kernel fills what is hidden before it scales: with a negative scale the row was NaN",
        Program(
            inputs=(Input("q", ("B", 1, "S", 64)), Input("k", ("B", 1, "S", 64)), Input("v", ("B", 1, "S", 64))),
            lines=(
                "hidden = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None]",
                "y = (q @ k.mT * -0.125).masked_fill(hidden, -math.inf).float().softmax(-1) @ v",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 3)),
        ),
    ),
    Kept(
        "pages gathered by a table that is turned",
        "the result of an index lies as its indices do in eager, and not in torch's own fakes",
        Program(
            inputs=(
                Input("table", ("B", 3), values="distinct 9", layout="transposed"),
                Input("keys", (9, 4, 1, 64)),
                Input("values", (9, 4, 1, 64)),
            ),
            lines=("rows = keys[table].flatten(1, 2)", "others = values[table]"),
            results=("rows", "others"),
            sizes=(("B", 2),),
        ),
    ),
    Kept(
        "an order of least numbers beside a padding that is added, in rows of all heads",
        "the padding was taken for a bias, and the order told in words, which a query without keys saw through",
        Program(
            inputs=(
                Input("q", ("B", 4, "S", 128)),
                Input("v", ("B", 4, "S", 128)),
                Input("padding", ("B", "S"), values="left padded"),
            ),
            lines=(
                "gone = 1.0 - padding[:, None, None, :]",
                "seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()",
                "gone = gone.masked_fill(gone.to(torch.bool), torch.finfo(q.dtype).min)",
                "scores = torch.where(seen, q @ q.mT, torch.finfo(q.dtype).min) + gone",
                "y = torch.bmm(scores.flatten(0, 1).softmax(-1), v.flatten(0, 1))",
            ),
            results=("y",),
            sizes=(("B", 2), ("S", 3)),
        ),
    ),
    Kept(
        "a padding of the least number of float16, at which scores are clamped",
        "it was a bias: but scores below zero are raised by the clamp, and float16 swallows none",
        Program(
            inputs=(
                Input("q", ("B", 4, "S", 128)),
                Input("k", ("B", 4, "S", 128)),
                Input("padding", ("B", "S"), values="left padded"),
            ),
            lines=(
                "gone = padding.masked_fill(padding.to(torch.bool), torch.finfo(q.dtype).min)",
                "scores = q @ k.mT * 0.088 + (torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype) + gone)",
                "scores = torch.max(scores, torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype))",
                "y = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ q",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
            dtype="float16",
        ),
    ),
    Kept(
        "two masks of float16's least number, of which one hides what the other has lowered",
        "their sum is -inf, which a bias tells as the least number: as if the key were lowered by one of them",
        Program(
            inputs=(
                Input("q", ("B", 4, "S", 64)),
                Input("padding", ("B", "S"), values="left padded"),
            ),
            lines=(
                "seen = torch.arange(q.shape[-2]) <= 0",
                "gone = padding[:, None, None, :].to(q.dtype)",
                "second = gone.masked_fill(gone.to(torch.bool), torch.finfo(q.dtype).min)",
                "first = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)",
                "y = (q @ q.mT * 0.125 + (second + first)).softmax(-1) @ q",
            ),
            results=("y",),
            sizes=(("B", 2), ("S", 2)),
            dtype="float16",
        ),
    ),
    Kept(
        "masked scores less their sum",
        "any number of a row went: but the sum of a row with a hidden key is -inf, and each weight NaN",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 128)),
                Input("k", ("B", 1, "S", 128)),
                Input("hidden", ("B", 1, "S", "S"), values="bool"),
            ),
            lines=(
                "scores = (q @ k.mT).masked_fill(hidden, -math.inf)",
                "e = torch.exp(scores - scores.sum(-1, keepdim=True))",
                "y = (e / e.sum(-1, keepdim=True)) @ k",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
        ),
    ),
    Kept(
        "exponentials of scores from which nothing was subtracted",
        "a query all of whose keys are hidden by a finite number gives 0 / 0, not the mean of all values",
        Program(
            inputs=(
                Input("q", ("B", 1, "S", 128)),
                Input("hidden", ("B", 1, "S", "S"), values="bool"),
            ),
            lines=(
                "e = torch.exp((q @ q.mT * 0.01).masked_fill(hidden, -1000000000.0))",
                "y = (e / e.sum(-1, keepdim=True)) @ q",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
        ),
    ),
    Kept(
        "a row of a cache that is written over another of it",
        "the call that writes in place was given rows in the memory that it writes to, which torch refuses",
        Program(
            inputs=(
                Input("cache", ("B", "S", 64)),
                Input("q", ("B", "S", 64)),
            ),
            lines=("cache[:, 0] = cache[:, -1]", "y = cache + q"),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
        ),
    ),
    Kept(
        "halves of a number of tokens that is not known",
        "a product with a size that the graph computes went before the node that computes it",
        Program(
            inputs=(
                Input("q", ("S", 4, 128)),
                Input("k", ("S", 1, 128)),
            ),
            lines=(
                "half = q.shape[0] // 2",
                "a, b, c = (x.transpose(0, 1)[None][:, :, :half] for x in (q, k, k))",
                "d, e, f = (x.transpose(0, 1)[None][:, :, half:] for x in (q, k, k))",
                "first = F.scaled_dot_product_attention(a, b, c, enable_gqa=True)",
                "second = F.scaled_dot_product_attention(d, e, f, enable_gqa=True)",
                "y = torch.cat((first, second), dim=2)[0].transpose(0, 1)",
            ),
            results=("y",),
            sizes=(("S", 3),),
            again=(("S", 6),),
        ),
    ),
    Kept(
        "no rows of what is joined and turned",
        "an empty cut and a turn were put one below the other for ever",
        Program(
            inputs=(
                Input("q", ("S", 2, 64)),
                Input("k", ("S", 2, 64)),
            ),
            lines=(
                "joined = torch.cat((q.transpose(0, 1), k.transpose(0, 1)), dim=1).transpose(0, 1)",
                "rest = joined[4:].transpose(0, 1)[None]",
                "y = F.scaled_dot_product_attention(q.transpose(0, 1)[None], rest, rest)",
            ),
            results=("joined", "rest"),
            sizes=(("S", 2),),
        ),
    ),
    Kept(
        "sequences of one page each, in another order than their table's",
        "what joins their pages was to be made of its own reshape, for ever",
        Program(
            inputs=(
                Input("keys", (9, 16, 2, 64)),
                Input("table", (2, 3), values="distinct 9", dtype="int32"),
                Input("q", (2, 2, 64)),
            ),
            lines=(
                "k, v = (keys[table[n, :1]].flatten(0, 1)[:9].transpose(0, 1)[None] for n in (1, 0))",
                "a, b = q[:1].transpose(0, 1)[None], q[1:].transpose(0, 1)[None]",
                "x = F.scaled_dot_product_attention(a, k, k)",
                "y = F.scaled_dot_product_attention(b, v, v)",
                "z = torch.cat((x, y), dim=2)",
            ),
            results=("z",),
        ),
    ),
    Kept(
        "an einsum that sums one number, of two dtypes",
        "torch multiplies there, in the wider dtype; it became a matmul, which takes one dtype alone",
        Program(
            inputs=(
                Input("q", (1, 4, 64)),
                Input("k", (1, 4, 64)),
            ),
            lines=(
                "scores = torch.einsum('qhd,khd->hqk', q, k).float() * 0.125",
                "y = torch.einsum('hqk,khd->qhd', scores.softmax(-1), k)",
            ),
            results=("y",),
            dtype="float16",
        ),
    ),
    Kept(
        "a segment of one query whose only key is hidden",
        "one query was taken to see the last key, whatever its mask",
        Program(
            inputs=(
                Input("q", (4, 2, 64)),
                Input("seen", (1, 1, 1, 1), values="below 1", dtype="bool"),
            ),
            lines=(
                "first, others = q[:1].transpose(0, 1)[None], q[1:].transpose(0, 1)[None]",
                "x = F.scaled_dot_product_attention(first, first, first, attn_mask=seen)",
                "y = F.scaled_dot_product_attention(others, others, others)",
                "z = torch.cat((x, y), dim=2)",
            ),
            results=("z",),
        ),
    ),
    Kept(
        "segments whose keys have as many heads or fewer",
        "they were joined, and torch raised",
        Program(
            inputs=(
                Input("q", (3, 4, 64)),
                Input("k", (3, 2, 64)),
            ),
            lines=(
                "first, second = q[:2].transpose(0, 1)[None], q[2:].transpose(0, 1)[None]",
                "keys = k[2:].transpose(0, 1)[None]",
                "x = F.scaled_dot_product_attention(first, first, first)",
                "y = F.scaled_dot_product_attention(second, keys, keys, enable_gqa=True)",
                "z = torch.cat((x, y), dim=2)",
            ),
            results=("z",),
        ),
    ),
    Kept(
        "sequences of unknown length one by one",
        "a symbolic length was given to the lowering as it is in the graph",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 64)),
                Input("k", ("B", 2, "S", 64)),
                Input("v", ("B", 2, "S", 64)),
            ),
            lines=(
                "parts = [(q[i:i + 1], k[i:i + 1], v[i:i + 1]) for i in range(3)]",
                "y = torch.cat([F.scaled_dot_product_attention(*each, is_causal=True) for each in parts])",
            ),
            results=("y",),
            sizes=(("B", 3), ("S", 6)),
            again=(("B", 3), ("S", 4)),
        ),
    ),
    Kept(
        "a result that has the name of another call",
        "two nodes of the exported program had one name",
        Program(
            inputs=(
                Input("q", ("B", 2, 1, 128)),
                Input("table", ("B", 3), values="distinct 9"),
                Input("keys", (9, 4, 2, 128)),
                Input("values", (9, 4, 2, 128)),
            ),
            lines=(
                "k = keys[table].flatten(1, 2).transpose(1, 2)",
                "v = values.index_select(0, table.flatten()).view(table.shape[0], 12, 2, 128).transpose(1, 2)",
                "y = ((q @ k.mT * 0.08838834764831845).softmax(-1) @ v).clone()",
            ),
            results=("y",),
            sizes=(("B", 1),),
            dtype="float16",
        ),
        door="exported",
    ),
    Kept(
        "masks whose sum overflows in float16, joined before heads are flattened",
        "keys hidden by both masks, at -inf, were shown to queries without keys like those hidden by one",
        Program(
            inputs=(
                Input("q", ("B", 4, "S", 64)),
                Input("k", ("B", 4, "S", 64)),
                Input("v", ("B", 4, "S", 64)),
                Input("padding", ("B", "S"), values="left padded"),
            ),
            lines=(
                "order = ~torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)",
                "gone = 1.0 - padding[:, None, None, :].to(q.dtype)",
                "second = gone.masked_fill(gone.to(torch.bool), torch.finfo(q.dtype).min)",
                "first = torch.zeros(order.shape, dtype=q.dtype).masked_fill(~order, torch.finfo(q.dtype).min)",
                "scores = (q @ k.mT * 0.125 + (second + first)).flatten(0, 1)",
                "p = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)",
                "o = torch.bmm(p, v.flatten(0, 1))",
                "y = o.view(q.shape[0], -1, *o.shape[1:])",
            ),
            results=("y",),
            sizes=(("B", 3), ("S", 7)),
            dtype="float16",
        ),
    ),
    Kept(
        "a sink beside the log-sum-exp of no keys",
        "the logarithm of no keys raised while masks were read",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 128)),
                Input("k", ("B", 2, "S", 128)),
                Input("sink", (2,)),
            ),
            lines=(
                "scores = q @ k.mT",
                "total = scores.logsumexp(-1, keepdim=True)",
                "p = torch.exp(scores - torch.logaddexp(total, sink.reshape(1, -1, 1, 1)))",
                "y = p @ k",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 0)),
        ),
    ),
    Kept(
        "a sink by a sigmoid, over as many keys as are passed in",
        "the sink was cut off at a number of keys that is not known",
        Program(
            inputs=(
                Input("q", ("B", 2, "S", 64)),
                Input("k", ("B", 2, "S", 64)),
                Input("v", ("B", 2, "S", 64)),
                Input("sink", (2,)),
            ),
            lines=(
                "scores = q @ k.mT * 0.125",
                "seen = torch.arange(k.shape[-2])[None, :] <= torch.arange(v.shape[-2])[:, None]",
                "scores = scores.masked_fill(seen.logical_not(), -math.inf)",
                "total = scores.logsumexp(-1, keepdim=True)",
                "p = scores.softmax(-1) * torch.sigmoid(total - sink.reshape(1, -1, 1, 1))",
                "y = p @ v",
            ),
            results=("y",),
            sizes=(("B", 1), ("S", 2)),
            again=(("B", 3), ("S", 4)),
        ),
    ),
    Kept(
        "einsum under autocast",
        "it was computed without the casts that autocast makes inside of it",
        Program(
            inputs=(Input("q", ("B", 2, "S", 32)), Input("k", ("B", "T", 32))),
            lines=("scores = torch.einsum('bnsd,btd->bnst', q, k)", "p = (scores * 0.125).softmax(-1)"),
            results=("p",),
            sizes=(("B", 1), ("S", 2), ("T", 3)),
            autocast=True,
        ),
    ),
    Kept(
        "experts of equal shares whose rows overflow",
        "the verification took rounding an overflowed row for a choice that nothing explains",
        Program(
            inputs=(
                Input("tokens1", ("T", 128), values="rows"),
                Input("logits2", ("T", 6), values="apart", power=12),
                Input("up8", (6, 64, 128), values="int8"),
                Input("d9", (6, 128, 32), values="int8"),
                Input("of_up10", (6, 64), values="scale 128"),
                Input("of_down11", (6, 128), values="scale 32"),
            ),
            lines=(
                "soft3 = F.softmax(logits2.float(), dim=-1)",
                "t4, t5 = torch.sort(soft3, dim=-1, descending=True)",
                "w6 = t4[:, :3]",
                "experts7 = t5[:, :3]",
                "h12 = tokens1.float()",
                "scale13 = h12.abs().amax(dim=-1, keepdim=True) / 127.0",
                "whole14 = (h12 * (1.0 / scale13)).round().clamp(-128, 127).to(torch.int8)",
                "rows15 = whole14.unsqueeze(1).expand(-1, 3, -1)",
                "scales16 = scale13.expand(tokens1.shape[0], 1).unsqueeze(1).expand(-1, 3, -1)",
                "other17 = experts7.flip(-1)",
                "h18 = up8[experts7]",
                "y19 = (h18.float() @ rows15.float().unsqueeze(-1)).squeeze(-1).float()",
                "channels20 = of_up10[experts7]",
                "h21 = y19 * y19 * scales16",
                "y22 = h21.to(tokens1.dtype)",
                "g23, g24 = y22.chunk(2, dim=-1)",
                "h25 = g24 * F.silu(g23)",
                "h26 = h25.float()",
                "scale27 = torch.max(torch.abs(h26), dim=-1, keepdim=True)[0] / 127",
                "whole28 = torch.round(h26 / scale27).to(torch.int8)",
                "other29 = (experts7 + 1) % d9.shape[0]",
                "h30 = d9[experts7]",
                "y31 = (whole28.int().unsqueeze(2) @ h30.int().mT).squeeze(2).float()",
                "channels32 = of_down11[experts7]",
                "h33 = y31 * scale27 * channels32",
                "y34 = h33.to(tokens1.dtype)",
                "listed35 = y34.flatten(0, 1)",
                "rows36 = listed35.reshape(*experts7.shape, -1)",
                "w37 = w6.to(rows36.dtype)",
                "y38 = torch.bmm(w37.unsqueeze(1).to(rows36.dtype), rows36).squeeze(1)",
                "y39 = y38.to(tokens1.dtype)",
            ),
            results=("y39", "g24.view(g24.shape)"),
            sizes=(("B", 1), ("S", 6), ("T", 5)),
            dtype="float16",
        ),
        door="verified",
    ),
)
