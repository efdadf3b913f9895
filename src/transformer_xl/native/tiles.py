"""The paper's attention on an NVIDIA card, forwards and backwards: kernels that Triton compiles. `cuda.py` is the door to them.

A program takes a tile of the queries of one lane and head past the keys that they see (or keys past queries) and keeps the maximum and the sum of
each softmax as it goes, so that neither scores nor probabilities ever stand in memory. Terms (b) and (d) come as products with every distance, of
which query i finds key j in column T-1-i+j: each row is read one step further left than the row before, as `relative_shift` views it.

    key            m m | 0 1 2       memory and segment stay where they are: a row's address is chosen,
    position row   4 3 | 2 1 0       and where a tile ends in neither, nothing is read
                                     each cell of a gradient is written by one program, once: no atomics

Axes of a tile: I queries, J keys, K width of a head. `width` is K's power of two, where the rest is zero. What is loaded is loaded where it is needed, and
nothing is hoisted out of a loop (`disable_licm`): registers are what there is least of.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""Of Philox: seven are enough to pass every test of randomness that its authors knew (Salmon et al. 2011)."""
NUMBERS = ["seed", "border", "B", "T", "M", "L", "reach"]
"""Not to be compiled for, each anew where it is 1 or divides by 16."""


@triton.jit
def stays(seed, border, row, i_I, first, J: tl.constexpr):
    """What dropout leaves of the keys from `first` on, drawn from lane, head, query and key alone: the same in every kernel. One draw serves four."""
    four_J = first // 4 + tl.arange(0, J // 4)
    a, b, c, d = tl.philox(seed, four_J[None, :], i_I[:, None], row, 0, n_rounds=ROUNDS)
    even = tl.join(a.to(tl.int32, bitcast=True) >= border, c.to(tl.int32, bitcast=True) >= border)
    odd = tl.join(b.to(tl.int32, bitcast=True) >= border, d.to(tl.int32, bitcast=True) >= border)
    return tl.reshape(tl.join(even, odd), (i_I.shape[0], J))


@triton.jit
def queries(query_THK, bias_HK, h, i_I, T, scale, H: tl.constexpr, K: tl.constexpr, width: tl.constexpr):
    """Of terms (a) and (c), scaled."""
    query_IK = rows(query_THK, i_I, T, H, K, width)
    exact_IK = query_IK.to(tl.float32)
    if bias_HK is not None:
        k_K = tl.arange(0, width)
        exact_IK += tl.load(bias_HK + h * K + k_K, mask=k_K < K, other=0.0).to(tl.float32)[None, :]
    return (exact_IK * scale).to(query_IK.dtype)


@triton.jit
def rows(from_THK, i_I, T, H: tl.constexpr, K: tl.constexpr, width: tl.constexpr):
    k_K = tl.arange(0, width)
    place_IK = from_THK + i_I[:, None] * (H * K) + k_K[None, :]
    return tl.load(place_IK, mask=(i_I < T)[:, None] & (k_K < K)[None, :], other=0.0)


@triton.jit
def places(memory_M2HK, segment_T2HK, j_J, M, H: tl.constexpr, K: tl.constexpr, width: tl.constexpr):
    """Where the keys of memory and segment stand; their values stand H*K further on."""
    old_J, new_J = memory_M2HK + j_J * (2 * H * K), segment_T2HK + (j_J - M) * (2 * H * K)
    # Both begin at whole words, which not every version of the compiler sees of an address that is chosen.
    row_J = tl.multiple_of(tl.where(j_J < M, old_J, new_J), 16)
    return row_J[:, None] + tl.arange(0, width)[None, :]


@triton.jit
def inside(j_J, S, K: tl.constexpr, width: tl.constexpr):
    return (j_J < S)[:, None] & (tl.arange(0, width) < K)[None, :]


@triton.jit
def sight(first_I, last_I, j_J):
    return (j_J[None, :] >= first_I[:, None]) & (j_J[None, :] <= last_I[:, None])


@triton.jit
def beside(position_TL, i_I, T, L):
    """Where each query finds the first key of all among its products with every distance; the others follow."""
    return position_TL + (T - 1) + i_I * (L - 1)


@triton.jit
def lowest_of(lowest_B, b):
    return 0 if lowest_B is None else tl.load(lowest_B + b).to(tl.int32)


@triton.jit(do_not_specialize=NUMBERS)
def forward(
    query_BTHK,
    memory_BM2HK,
    segment_BT2HK,
    position_HBTL,
    bias_HK,
    lowest_B,
    out_BTHK,
    total_BHT,
    scale,
    raised,
    seed,
    border,
    B,
    T,
    M,
    L,
    reach,
    H: tl.constexpr,
    K: tl.constexpr,
    width: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    dropped: tl.constexpr,
    precision: tl.constexpr,
):
    """`total_BHT`: the logarithm of the sum of each softmax, which is all that the way back needs of it."""
    tiles, S = tl.cdiv(T, I), M + T
    row, i0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * I
    b, h = (row // H).to(tl.int64), row % H
    memory_M2HK, segment_T2HK = memory_BM2HK + (b * M * 2 * H + h) * K, segment_BT2HK + (b * T * 2 * H + h) * K
    position_TL = position_HBTL + (h * B + b) * T * L
    lowest = lowest_of(lowest_B, b)
    i_I = i0 + tl.arange(0, I)
    query_IK = queries(query_BTHK + (b * T * H + h) * K, bias_HK, h, i_I, T, scale, H, K, width)
    first_I, last_I = tl.maximum(lowest, M + i_I - reach), tl.where(i_I < T, M + i_I, -1)
    position_I = beside(position_TL, i_I, T, L)
    most_I = tl.full([I], float("-inf"), tl.float32)
    sum_I = tl.zeros([I], tl.float32)
    mixed_IK = tl.zeros([I, width], tl.float32)
    first = tl.maximum(tl.maximum(lowest, M + i0 - reach), 0) // J * J
    for j0 in tl.range(first, tl.minimum(S, M + i0 + I), J, disable_licm=True):
        j_J = j0 + tl.arange(0, J)
        place_JK = places(memory_M2HK, segment_T2HK, j_J, M, H, K, width)
        place_IJ = (position_I + j0)[:, None] + tl.arange(0, J)[None, :]
        position_IJ = tl.load(place_IJ).to(tl.float32)  # without a mask: there is room beyond the last row
        key_JK = tl.load(place_JK, mask=inside(j_J, S, K, width), other=0.0)
        score_IJ = position_IJ + tl.dot(query_IK, tl.trans(key_JK), input_precision=precision)
        score_IJ = tl.where(sight(first_I, last_I, j_J), score_IJ, float("-inf"))
        higher_I = tl.maximum(most_I, tl.max(score_IJ, 1))
        # A row that has seen nothing yet is all -inf, and -inf - -inf would be no number.
        zero_I = tl.where(higher_I == float("-inf"), 0.0, higher_I)
        share_IJ = tl.exp(score_IJ - zero_I[:, None])
        fade_I = tl.exp(most_I - zero_I)
        sum_I = sum_I * fade_I + tl.sum(share_IJ, 1)
        if dropped:
            share_IJ = tl.where(stays(seed, border, row, i_I, j0, J), share_IJ, 0.0)
        value_JK = tl.load(place_JK + H * K, mask=inside(j_J, S, K, width), other=0.0)
        mixed_IK = mixed_IK * fade_I[:, None]
        mixed_IK += tl.dot(share_IJ.to(value_JK.dtype), value_JK, input_precision=precision)
        most_I = higher_I
    sum_I = tl.where(i_I < T, sum_I, 1.0)
    k_K = tl.arange(0, width)
    place_IK = out_BTHK + (b * T * H + h) * K + i_I[:, None] * (H * K) + k_K[None, :]
    mixed_IK = mixed_IK * (raised / sum_I)[:, None]
    tl.store(place_IK, mixed_IK.to(out_BTHK.dtype.element_ty), mask=(i_I < T)[:, None] & (k_K < K)[None, :])
    tl.store(total_BHT + row.to(tl.int64) * T + i_I, most_I + tl.log(sum_I), mask=i_I < T)


@triton.jit(do_not_specialize=NUMBERS)
def backward_queries(
    query_BTHK,
    memory_BM2HK,
    segment_BT2HK,
    position_HBTL,
    bias_HK,
    lowest_B,
    out_BTHK,
    total_BHT,
    gradient_BTHK,
    delta_BHT,
    gradient_query_BTHK,
    gradient_position_HBTL,
    scale,
    raised,
    seed,
    border,
    B,
    T,
    M,
    L,
    reach,
    H: tl.constexpr,
    K: tl.constexpr,
    width: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    dropped: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradients of queries (of terms (a) and (c)) and of the position products, whose cells that nobody sees must be zero before. `delta_BHT`: gradient . out,
    for `backward_keys`."""
    tiles, S = tl.cdiv(T, I), M + T
    row, i0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * I
    b, h = (row // H).to(tl.int64), row % H
    memory_M2HK, segment_T2HK = memory_BM2HK + (b * M * 2 * H + h) * K, segment_BT2HK + (b * T * 2 * H + h) * K
    position, rowed, lane = (h * B + b) * T * L, row.to(tl.int64) * T, (b * T * H + h) * K
    lowest = lowest_of(lowest_B, b)
    i_I = i0 + tl.arange(0, I)
    query_IK = queries(query_BTHK + lane, bias_HK, h, i_I, T, scale, H, K, width)
    gradient_IK = rows(gradient_BTHK + lane, i_I, T, H, K, width)
    out_IK = rows(out_BTHK + lane, i_I, T, H, K, width)
    delta_I = tl.sum(gradient_IK.to(tl.float32) * out_IK.to(tl.float32), 1)
    tl.store(delta_BHT + rowed + i_I, delta_I, mask=i_I < T)
    total_I = tl.load(total_BHT + rowed + i_I, mask=i_I < T, other=0.0)
    first_I, last_I = tl.maximum(lowest, M + i_I - reach), tl.where(i_I < T, M + i_I, -1)
    position_I = beside(position_HBTL + position, i_I, T, L)
    found_I = beside(gradient_position_HBTL + position, i_I, T, L)
    found_IK = tl.zeros([I, width], tl.float32)
    first = tl.maximum(tl.maximum(lowest, M + i0 - reach), 0) // J * J
    for j0 in tl.range(first, tl.minimum(S, M + i0 + I), J, disable_licm=True):
        j_J = j0 + tl.arange(0, J)
        place_JK = places(memory_M2HK, segment_T2HK, j_J, M, H, K, width)
        seen_IJ = sight(first_I, last_I, j_J)
        place_IJ = (position_I + j0)[:, None] + tl.arange(0, J)[None, :]
        position_IJ = tl.load(place_IJ).to(tl.float32)
        key_JK = tl.load(place_JK, mask=inside(j_J, S, K, width), other=0.0)
        score_IJ = position_IJ + tl.dot(query_IK, tl.trans(key_JK), input_precision=precision)
        probability_IJ = tl.where(seen_IJ, tl.exp(score_IJ - total_I[:, None]), 0.0)
        value_JK = tl.load(place_JK + H * K, mask=inside(j_J, S, K, width), other=0.0)
        upward_IJ = tl.dot(gradient_IK, tl.trans(value_JK), input_precision=precision)
        if dropped:
            upward_IJ = tl.where(stays(seed, border, row, i_I, j0, J), upward_IJ * raised, 0.0)
        change_IJ = (probability_IJ * (upward_IJ - delta_I[:, None])).to(key_JK.dtype)
        tl.store((found_I + j0)[:, None] + tl.arange(0, J)[None, :], change_IJ, mask=seen_IJ)
        found_IK += tl.dot(change_IJ, key_JK, input_precision=precision)
    k_K = tl.arange(0, width)
    place_IK = gradient_query_BTHK + lane + i_I[:, None] * (H * K) + k_K[None, :]
    found_IK = (found_IK * scale).to(gradient_query_BTHK.dtype.element_ty)
    tl.store(place_IK, found_IK, mask=(i_I < T)[:, None] & (k_K < K)[None, :])


@triton.jit(do_not_specialize=NUMBERS)
def backward_keys(
    query_BTHK,
    memory_BM2HK,
    segment_BT2HK,
    position_HBTL,
    bias_HK,
    lowest_B,
    total_BHT,
    gradient_BTHK,
    delta_BHT,
    gradient_memory_BM2HK,
    gradient_segment_BT2HK,
    scale,
    raised,
    seed,
    border,
    B,
    T,
    M,
    L,
    reach,
    H: tl.constexpr,
    K: tl.constexpr,
    width: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    dropped: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradients of keys and values."""
    tiles, S = tl.cdiv(M + T, J), M + T
    row, j0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * J
    b, h = (row // H).to(tl.int64), row % H
    old, new = (b * M * 2 * H + h) * K, (b * T * 2 * H + h) * K
    position_TL, rowed, lane = position_HBTL + (h * B + b) * T * L, row.to(tl.int64) * T, (b * T * H + h) * K
    lowest = lowest_of(lowest_B, b)
    j_J = j0 + tl.arange(0, J)
    place_JK = places(memory_BM2HK + old, segment_BT2HK + new, j_J, M, H, K, width)
    key_JK = tl.load(place_JK, mask=inside(j_J, S, K, width), other=0.0)
    value_JK = tl.load(place_JK + H * K, mask=inside(j_J, S, K, width), other=0.0)
    found_key_JK = tl.zeros([J, width], tl.float32)
    found_value_JK = tl.zeros([J, width], tl.float32)
    stop = tl.where(j0 + J > lowest, tl.minimum(T, j0 + J - M + reach), 0)
    for i0 in tl.range(tl.maximum(j0 - M, 0) // I * I, stop, I, disable_licm=True):
        i_I = i0 + tl.arange(0, I)
        first_I, last_I = tl.maximum(lowest, M + i_I - reach), tl.where(i_I < T, M + i_I, -1)
        place_IJ = (beside(position_TL, i_I, T, L) + j0)[:, None] + tl.arange(0, J)[None, :]
        position_IJ = tl.load(place_IJ).to(tl.float32)
        query_IK = queries(query_BTHK + lane, bias_HK, h, i_I, T, scale, H, K, width)
        score_IJ = position_IJ + tl.dot(query_IK, tl.trans(key_JK), input_precision=precision)
        total_I = tl.load(total_BHT + rowed + i_I, mask=i_I < T, other=0.0)
        probability_IJ = tl.where(sight(first_I, last_I, j_J), tl.exp(score_IJ - total_I[:, None]), 0.0)
        delta_I = tl.load(delta_BHT + rowed + i_I, mask=i_I < T, other=0.0)
        gradient_IK = rows(gradient_BTHK + lane, i_I, T, H, K, width)
        upward_IJ = tl.dot(gradient_IK, tl.trans(value_JK), input_precision=precision)
        left_IJ = probability_IJ
        if dropped:
            stays_IJ = stays(seed, border, row, i_I, j0, J)
            left_IJ = tl.where(stays_IJ, probability_IJ, 0.0)
            upward_IJ = tl.where(stays_IJ, upward_IJ * raised, 0.0)
        change_IJ = probability_IJ * (upward_IJ - delta_I[:, None])
        found_value_JK += tl.dot(tl.trans(left_IJ.to(value_JK.dtype)), gradient_IK, input_precision=precision)
        found_key_JK += tl.dot(tl.trans(change_IJ.to(key_JK.dtype)), query_IK, input_precision=precision)
    place_JK = places(gradient_memory_BM2HK + old, gradient_segment_BT2HK + new, j_J, M, H, K, width)
    tl.store(place_JK, found_key_JK.to(key_JK.dtype), mask=inside(j_J, S, K, width))
    tl.store(place_JK + H * K, (found_value_JK * raised).to(key_JK.dtype), mask=inside(j_J, S, K, width))
