// SPDX-License-Identifier: Apache-2.0
// Pages of int4: unpacked to int8 and multiplied as such; and how a token is appended to one.

// Tokens of a page lie in lanes of four so that codes of a row need no shuffle: t with t + 16, + 32, + 48.
constexpr std::int64_t quarter = page_tokens / 4;

// int4 -> int8, see kv_cache.h; for each line of `from`, the line `ahead` bytes further is prefetched.
template <std::int64_t RUN>
INLINE void unpack(const std::uint8_t* from, std::int64_t bytes, std::ptrdiff_t ahead, std::int8_t* to) {
  using Bytes = Vector<std::uint8_t, RUN < VECTOR_BYTES ? RUN : VECTOR_BYTES>;
  for (std::int64_t i = 0; i < bytes; i += RUN) {
    UNROLL for (std::int64_t k = 0; k < RUN; k += std::int64_t(sizeof(Bytes))) {
      if ((i + k) % 64 == 0) fetch_ahead(from + i + k + ahead);
      const Bytes both = load<Bytes>(from + i + k);
      const Bytes low = both & 15, high = both >> 4;
      store(to + 2 * i + k, low + low - 15);
      store(to + 2 * i + k + RUN, high + high - 15);
    }
  }
}

// A page of int4 as one of int8, in the scratch space of widened floats.
TARGET static PageAttention unpacked(const PageAttention& work) {
  const std::int64_t padded = padded_dim(work.head_dim);
  const std::uint8_t *keys = static_cast<const std::uint8_t*>(work.page.keys),
                     *values = static_cast<const std::uint8_t*>(work.page.values);
  std::int8_t* wide_keys = reinterpret_cast<std::int8_t*>(work.wide);
  std::int8_t* wide_values = wide_keys + page_tokens * padded;
  unpack<key_run>(keys, (work.head_dim + 7) / 8 * key_run, values - keys, wide_keys);
  const std::ptrdiff_t to_next = static_cast<const std::uint8_t*>(work.next_keys) - values;
  unpack<value_run>(values, page_tokens / 2 * padded, to_next, wide_values);
  PageAttention as_int8 = work;
  as_int8.type = CacheType::int8;
  as_int8.page.keys = wide_keys;
  as_int8.page.values = wide_values;
  as_int8.next_keys = wide_keys;
  return as_int8;
}

// x -> codes u from 0 to 15 that stand for 2u - 15 times the scale; the scale is NaN if any x is.
INLINE void quantize_halves(const float* x, std::int64_t n, std::uint8_t* codes, float* scale) {
  const std::int32_t key = largest_key(reinterpret_cast<const std::int32_t*>(x), n);
  const float largest = to_float(key) < 1e-5f ? 1e-5f : to_float(key);
  const bool is_finite = key < infinity_key<std::int32_t>;
  *scale = is_finite ? largest / 15.0f : std::numeric_limits<float>::quiet_NaN();
  const float inverse = 7.5f / largest;
  for (std::int64_t i = 0; i < n; ++i) codes[i] = is_finite ? std::uint8_t(int(x[i] * inverse + 8.0f)) : 8;
}

TARGET static void append_int4(const PageView& page, std::int64_t slot, const float* key,
                               const float* value, std::int64_t head_dim) {
  const std::int64_t padded = padded_dim(head_dim);
  std::uint8_t codes[max_head_dim] = {};
  std::uint8_t* keys = static_cast<std::uint8_t*>(page.keys) + 4 * slot;
  std::uint8_t* values = static_cast<std::uint8_t*>(page.values) + slot % quarter * 2 * padded + slot / quarter;
  quantize_halves(key, head_dim, codes, page.key_scales + slot);
  for (std::int64_t i = 0; i < head_dim; i += 8) {
    for (int k = 0; k < 4; ++k) keys[i / 8 * key_run + k] = codes[i + k] | codes[i + 4 + k] << 4;
  }
  quantize_halves(value, head_dim, codes, page.value_scales + slot);
  for (std::int64_t i = 0; i < padded; i += 16) {
    for (int k = 0; k < 8; ++k) values[2 * i + 4 * k] = codes[i + k] | codes[i + 8 + k] << 4;
  }
}
