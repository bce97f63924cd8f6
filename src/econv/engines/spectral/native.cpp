// The spectral engine on one CPU: a tile of pixels at a time, so that derivatives stay in the cache.
//
// The steps are those of econv.plan. For every tile: the spectrum of the input and a rim around it
// (analysis), its derivatives combined to features (differentiate), one matrix product for each
// block (multiply), and back to channels (synthesise). With `other`, an image of the output's shape,
// also the inner products of every feature with every slot of its spectrum (correlate): the gradient
// to the weights.
//
// REAL is float or double. Pixels run along the vectors; images are [batch, channels, rows, columns].

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#endif

#ifndef REAL
#define REAL float
#endif

using Real = REAL;

#if defined(__AVX512F__)
constexpr int BYTES = 64;
constexpr int TALL = 12;  // rows of accumulators; two vectors each
#elif defined(__AVX__)
constexpr int BYTES = 32;
constexpr int TALL = 6;
#elif defined(__aarch64__)
constexpr int BYTES = 16;
constexpr int TALL = 12;
#else
constexpr int BYTES = 16;
constexpr int TALL = 6;
#endif
constexpr int LANES = BYTES / static_cast<int>(sizeof(Real));
constexpr int AHEAD = 8;  // vectors that are fetched before they are read
constexpr int64_t Z_BYTES = 400 << 10;  // features of one tile

// Vectors of the full or of half the width, loaded and stored at any address.
template <int B>
struct Vec {
  typedef Real type __attribute__((vector_size(B)));
  typedef Real loose __attribute__((vector_size(B), aligned(sizeof(Real)), may_alias));
  static constexpr int lanes = B / static_cast<int>(sizeof(Real));
  static inline type load(const Real* p) { return *reinterpret_cast<const loose*>(p); }
  static inline void store(Real* p, type v) { *reinterpret_cast<loose*>(p) = v; }
};
using Full = Vec<BYTES>;
using V = Full::type;

extern "C" {
struct Block {
  int64_t rows, inner, columns;
  int64_t weight;  // where its matrix [inner, columns] of entries starts
};

// A matrix [rows, places] as pairs of places whose sum and difference are taken, one after the other,
// and the few entries that are left, by rows and by places.
struct Transform {
  int64_t rows, places, pairs, first, singles;
  const int64_t* pair;    // the first ones have no place in common …
  const int64_t* single;  // … and leave these places out
  const int64_t *row_start, *row_place;
  const Real* row_factor;
  const int64_t *place_start, *place_row;
  const Real* place_factor;
};

// What econv.engines.spectral.native fills in: sizes, then arrays. The layout is checked by its size.
struct Job {
  int64_t size_of_job, threads;
  int64_t batch, in_fields, out_fields, in_channels, out_channels;  // channels of one field
  int64_t height, width, out_height, out_width;
  int64_t x_stride, other_stride;  // from one image to the next
  int64_t up, down, dilation, before, size;
  int64_t stencils, features, slots, weights, blocks;  // slots: those that blocks write
  const Real *x, *w, *other;
  Real *y, *w_gradient;
  Transform analysis;   // channels of an input field to its spectrum
  Transform synthesis;  // channels of an output field to the slots of the blocks; used both ways
  const int64_t* class_start;            // [7], into entries: stencils by classes of symmetry
  const int64_t* class_stencil;          // of each entry
  const int64_t* class_adds;             // whether it adds to what an earlier class gave
  const Real* class_factor;              // its factors, as many as its class has parts
  const int64_t* feature_place;          // [features, 2], into in_channels × stencils
  const Real* feature_factor;            // [features, 2]
  const Block* block;
  const int64_t* entry;                  // which weight stands where, block after block
  const Real* sign;
};
}

// Inlined into one another these functions run out of registers.
#define APART __attribute__((noinline))

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Memory that a thread keeps from call to call: fresh pages cost as much as the arithmetic.
struct Scratch {
  Real* data = nullptr;
  int64_t held = 0;
  Real* take(int64_t count) {
    if (count > held) {
      std::free(data);
      held = round_up(count, 1024);
      data = static_cast<Real*>(std::aligned_alloc(64, round_up(held * sizeof(Real), 64)));
      if (data) std::memset(data, 0, held * sizeof(Real));  // no uninitialised value is ever read
      else held = 0;
    }
    return data;
  }
  ~Scratch() { std::free(data); }
};

// How the output is cut up: regions go to threads; within one, tiles follow one another downwards,
// and of the spectrum only those lines are kept that the current tile reads.
struct Cut {
  int64_t region_rows, region_columns, across, down, tile_rows;
  int64_t pitch, phase_pitch, ring, map;  // lines, and how many, of one map of the spectrum
  int64_t pixels;                         // row length of the features
};

Cut cut_up(const Job& j) {
  Cut c;
  const int64_t reach = j.dilation * (j.size - 1);
  int64_t features = 0;
  for (int64_t b = 0; b < j.blocks; b++) features += j.block[b].rows * j.block[b].inner;
  const int64_t each = features * j.in_fields * static_cast<int64_t>(sizeof(Real));
  const int64_t fits = std::max<int64_t>(2 * LANES, Z_BYTES / std::max<int64_t>(1, each));
  c.across = ceil_div(j.out_width, fits);
  c.region_columns = ceil_div(j.out_width, c.across);
  if (c.across > 1) c.region_columns = round_up(c.region_columns, LANES);
  c.across = ceil_div(j.out_width, c.region_columns);
  c.tile_rows = std::min(j.out_height, std::max<int64_t>(1, fits / c.region_columns));
  // Enough regions for all threads, if the rim above and below does not outweigh them.
  const int64_t wanted = ceil_div(4 * j.threads, j.batch * c.across);
  const int64_t least = std::max<int64_t>(8, 2 * reach);
  c.region_rows = std::max(ceil_div(j.out_height, wanted), std::min(least, j.out_height));
  c.region_rows = std::min(j.out_height, round_up(c.region_rows, c.tile_rows));
  c.down = ceil_div(j.out_height, c.region_rows);
  // Vectors reach beyond the end of a line, and read what follows without using it.
  c.phase_pitch = round_up(c.region_columns, LANES) + reach / j.down + 1;
  c.pitch = c.phase_pitch * j.down;
  c.ring = (c.tile_rows - 1) * j.down + reach + 1;
  c.map = c.ring * c.pitch + 2 * LANES;
  // The last line may be written up to a whole vector.
  c.pixels = (c.tile_rows - 1) * c.region_columns + round_up(c.region_columns, LANES);
  c.pixels = round_up(c.pixels, LANES);
  return c;
}

V load_some(const Real* p, int64_t count) {
  if (count >= LANES) return Full::load(p);
  if (count <= 0) return V{};
  alignas(BYTES) Real buffer[LANES] = {};
  std::memcpy(buffer, p, count * sizeof(Real));
  return Full::load(buffer);
}

void store_some(Real* p, V v, int64_t count) {
  if (count >= LANES) return Full::store(p, v);
  if (count <= 0) return;
  alignas(BYTES) Real buffer[LANES];
  Full::store(buffer, v);
  std::memcpy(p, buffer, count * sizeof(Real));
}

// Vectors of pixels of several maps, `in_step` and `out_step` apart, through a transform (or, turned,
// through its transpose). `count` pixels may be read and written at the end of a line, or all.
template <int N>
APART void transform_some(const Transform& t, bool turned, const Real* in, int64_t in_step,
                           Real* out, int64_t out_step, int64_t count, bool read_all,
                           bool write_all, V* place) {
  const auto read = [&](const Real* p, int n) {
    return read_all ? Full::load(p + n * LANES) : load_some(p + n * LANES, count - n * LANES);
  };
  const auto write = [&](Real* p, int n, V v) {
    if (write_all) Full::store(p + n * LANES, v);
    else store_some(p + n * LANES, v, count - n * LANES);
  };
  const auto sums = [&](int64_t c, const int64_t* start, const int64_t* which, const Real* factor,
                        const V* from, V (&sum)[N]) {
    for (int n = 0; n < N; n++) sum[n] = V{};
    for (int64_t e = start[c]; e < start[c + 1]; e++)
      for (int n = 0; n < N; n++) sum[n] += factor[e] * from[which[e] * N + n];
  };
  const auto butterfly = [&](int64_t p) {
    V *a = place + t.pair[2 * p] * N, *b = place + t.pair[2 * p + 1] * N;
    for (int n = 0; n < N; n++) {
      const V sum = a[n] + b[n];
      b[n] = a[n] - b[n];
      a[n] = sum;
    }
  };
  // Stores are dear: the first pairs are read, and when turned written, without a detour.
  V sum[N];
  if (!turned) {
    for (int64_t p = 0; p < t.first; p++) {
      const int64_t a = t.pair[2 * p], b = t.pair[2 * p + 1];
      const Real *x = in + a * in_step, *y = in + b * in_step;
      for (int n = 0; n < N; n++) {
        // Many streams at a time, more than the processor follows by itself.
        __builtin_prefetch(x + (n + AHEAD) * LANES);
        __builtin_prefetch(y + (n + AHEAD) * LANES);
        const V u = read(x, n), v = read(y, n);
        place[a * N + n] = u + v;
        place[b * N + n] = u - v;
      }
    }
    for (int64_t i = 0; i < t.singles; i++)
      for (int n = 0; n < N; n++)
        place[t.single[i] * N + n] = read(in + t.single[i] * in_step, n);
    for (int64_t p = t.first; p < t.pairs; p++) butterfly(p);
    for (int64_t r = 0; r < t.rows; r++) {
      sums(r, t.row_start, t.row_place, t.row_factor, place, sum);
      for (int n = 0; n < N; n++) write(out + r * out_step, n, sum[n]);
    }
  } else {
    V* row = place + t.places * N;
    for (int64_t r = 0; r < t.rows; r++)
      for (int n = 0; n < N; n++) row[r * N + n] = read(in + r * in_step, n);
    for (int64_t c = 0; c < t.places; c++) {
      sums(c, t.place_start, t.place_row, t.place_factor, row, sum);
      for (int n = 0; n < N; n++) place[c * N + n] = sum[n];
    }
    for (int64_t p = t.pairs - 1; p >= t.first; p--) butterfly(p);
    for (int64_t p = 0; p < t.first; p++) {
      const int64_t a = t.pair[2 * p], b = t.pair[2 * p + 1];
      for (int n = 0; n < N; n++) {
        const V u = place[a * N + n], v = place[b * N + n];
        write(out + a * out_step, n, u + v);
        write(out + b * out_step, n, u - v);
      }
    }
    for (int64_t i = 0; i < t.singles; i++)
      for (int n = 0; n < N; n++)
        write(out + t.single[i] * out_step, n, place[t.single[i] * N + n]);
  }
}

void transform(const Transform& t, bool turned, const Real* in, int64_t in_step, Real* out,
               int64_t out_step, int64_t count, bool reads_beyond, bool writes_beyond,
               Real* scratch) {
  V* place = reinterpret_cast<V*>(scratch);
  int64_t p = 0;
  for (; p + LANES < count; p += 2 * LANES) {
    const bool whole = count - p >= 2 * LANES;
    transform_some<2>(t, turned, in + p, in_step, out + p, out_step, count - p,
                      reads_beyond || whole, writes_beyond || whole, place);
  }
  if (p < count) {
    const bool whole = count - p >= LANES;
    transform_some<1>(t, turned, in + p, in_step, out + p, out_step, count - p,
                      reads_beyond || whole, writes_beyond || whole, place);
  }
}

// Some lines of the spectrum of a region, counted from the first that it reads: [field, slot, line,
// phase, column]. Column c of the padded, spread line lies at phase c % down, place c / down, so
// that strided reads are dense; line l lies at l % ring.
APART void analyse(const Job& j, const Cut& c, const Real* image, int64_t top, int64_t left,
                   int64_t from, int64_t to, Real* spectrum, Real* line, Real* scratch) {
  const int64_t plane = j.height * j.width;
  const int64_t first_row = top * j.down - j.before, first = left * j.down - j.before;
  const int64_t needed = (c.region_columns - 1) * j.down + j.dilation * (j.size - 1) + 1;
  // Source columns whose place `column * up - first` lies within the needed ones.
  const int64_t begin = first > 0 ? ceil_div(first, j.up) : 0;
  const int64_t end = std::min(j.width, needed + first > 0 ? ceil_div(needed + first, j.up) : 0);
  const int64_t length = std::max<int64_t>(0, end - begin), start = begin * j.up - first;
  const bool plain = j.up == 1 && j.down == 1;
  const int64_t line_step = round_up(j.width, LANES) + 2 * LANES;
  for (int64_t field = 0; field < j.in_fields; field++)
    for (int64_t l = from; l < to; l++) {
      const int64_t spread = first_row + l;
      Real* target = spectrum + field * j.in_channels * c.map + l % c.ring * c.pitch;
      if (length == 0 || spread < 0 || spread % j.up || spread / j.up >= j.height) {
        for (int64_t slot = 0; slot < j.in_channels; slot++)
          std::memset(target + slot * c.map, 0, c.pitch * sizeof(Real));
        continue;
      }
      const Real* source =
          image + field * j.in_channels * plane + spread / j.up * j.width + begin;
      if (plain) {
        transform(j.analysis, false, source, plane, target + start, c.map, length, false, false,
                  scratch);
        for (int64_t slot = 0; slot < j.in_channels; slot++) {
          Real* row = target + slot * c.map;
          std::memset(row, 0, start * sizeof(Real));
          std::memset(row + start + length, 0, (c.pitch - start - length) * sizeof(Real));
        }
        continue;
      }
      transform(j.analysis, false, source, plane, line, line_step, length, false, true, scratch);
      for (int64_t slot = 0; slot < j.in_channels; slot++) {
        Real* row = target + slot * c.map;
        std::memset(row, 0, c.pitch * sizeof(Real));
        for (int64_t u = 0; u < length; u++) {
          const int64_t place = start + u * j.up;
          row[place % j.down * c.phase_pitch + place / j.down] = line[slot * line_step + u];
        }
      }
    }
}

// Those derivatives of one map whose stencils have terms in one class of symmetric parts.
template <int M, class U>
inline __attribute__((always_inline)) void add_class(const Job& j, int which, const Real*& factor,
                                                     const U (&part)[M ? M : 1], U* found,
                                                     int64_t step) {
  for (int64_t e = j.class_start[which]; e < j.class_start[which + 1]; e++, factor += M) {
    U sum = U{};
#pragma GCC unroll 64
    for (int m = 0; m < M; m++) sum += factor[m] * part[m];
    U* to = found + j.class_stencil[e] * step;
    *to = j.class_adds[e] ? *to + sum : sum;
  }
}

// The derivatives of one map at one vector of pixels. The patch is split into sums and differences
// of opposite taps, along x, along y and across the diagonal, six classes in all; a stencil with the
// symmetry of its operator reads one of them.
template <int R, int B>
APART void derivatives(const Real* at, const int64_t* row, const int64_t* column, const Job& j,
                        typename Vec<B>::type* found, int64_t step) {
  using W = Vec<B>;
  using U = typename W::type;
  constexpr int K = 2 * R + 1;
  U even[K][R + 1], odd[K][R ? R : 1];  // along x, for every row
#pragma GCC unroll 16
  for (int r = 0; r < K; r++) {
    const Real* line = at + row[r];
    even[r][0] = W::load(line + column[R]);
#pragma GCC unroll 16
    for (int i = 1; i <= R; i++) {
      const U right = W::load(line + column[R + i]), left = W::load(line + column[R - i]);
      even[r][i] = right + left;
      odd[r][i - 1] = right - left;
    }
  }
  const Real* factor = j.class_factor;
  {
    U both[R + 1][R + 1];  // even along y and x
#pragma GCC unroll 16
    for (int i = 0; i <= R; i++) {
      both[0][i] = even[R][i];
#pragma GCC unroll 16
      for (int a = 1; a <= R; a++) both[a][i] = even[R + a][i] + even[R - a][i];
    }
    U sums[(R + 1) * (R + 2) / 2], differences[R ? R * (R + 1) / 2 : 1];
    int s = 0, d = 0;
#pragma GCC unroll 16
    for (int a = 0; a <= R; a++) {
      sums[s++] = both[a][a];
#pragma GCC unroll 16
      for (int b = a + 1; b <= R; b++) {
        sums[s++] = both[a][b] + both[b][a];
        differences[d++] = both[a][b] - both[b][a];
      }
    }
    add_class<(R + 1) * (R + 2) / 2>(j, 0, factor, sums, found, step);
    add_class<R * (R + 1) / 2>(j, 1, factor, differences, found, step);
  }
  if constexpr (R > 0) {
    U part[R * (R + 1)];
#pragma GCC unroll 16
    for (int a = 1; a <= R; a++)
#pragma GCC unroll 16
      for (int i = 0; i <= R; i++)
        part[(a - 1) * (R + 1) + i] = even[R + a][i] - even[R - a][i];
    add_class<R * (R + 1)>(j, 2, factor, part, found, step);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      part[i * (R + 1)] = odd[R][i];
#pragma GCC unroll 16
      for (int a = 1; a <= R; a++) part[i * (R + 1) + a] = odd[R + a][i] + odd[R - a][i];
    }
    add_class<R * (R + 1)>(j, 3, factor, part, found, step);
    U both[R][R], sums[R * (R + 1) / 2], differences[R > 1 ? R * (R - 1) / 2 : 1];
    int s = 0, d = 0;
#pragma GCC unroll 16
    for (int a = 0; a < R; a++)
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) both[a][i] = odd[R + a + 1][i] - odd[R - a - 1][i];
#pragma GCC unroll 16
    for (int a = 0; a < R; a++) {
      sums[s++] = both[a][a];
#pragma GCC unroll 16
      for (int b = a + 1; b < R; b++) {
        sums[s++] = both[a][b] + both[b][a];
        differences[d++] = both[a][b] - both[b][a];
      }
    }
    add_class<R * (R + 1) / 2>(j, 4, factor, sums, found, step);
    add_class<R * (R - 1) / 2>(j, 5, factor, differences, found, step);
  }
}

// One field's features at N vectors of pixels, from its derivatives.
template <int B, int N>
APART void combine(const Job& j, int64_t pixels, int64_t field, const typename Vec<B>::type* found,
                   Real* z) {
  using W = Vec<B>;
  using U = typename W::type;
  const int64_t* place = j.feature_place;
  const Real* factor = j.feature_factor;
  for (int64_t b = 0; b < j.blocks; b++) {
    const int64_t inner = j.block[b].inner;
    for (int64_t r = 0; r < j.block[b].rows; r++) {
      Real* to = z + field * inner * pixels;
      for (const int64_t* end = place + 2 * inner; place < end; place += 2, factor += 2) {
        const U *one = found + place[0] * N, *two = found + place[1] * N;
        const Real f = factor[0], g = factor[1];
        for (int n = 0; n < N; n++) W::store(to + n * W::lanes, f * one[n] + g * two[n]);
        to += pixels;
      }
      z += inner * j.in_fields * pixels;
    }
  }
}

template <int R, int B, int N>
inline void features_at(const Job& j, const Cut& c, const Real* maps, const int64_t* row,
                        const int64_t* column, int64_t field, Real* z,
                        typename Vec<B>::type* found) {
  for (int64_t slot = 0; slot < j.in_channels; slot++)
    for (int n = 0; n < N; n++)
      derivatives<R, B>(maps + slot * c.map + n * Vec<B>::lanes, row, column, j,
                        found + slot * j.stencils * N + n, N);
  combine<B, N>(j, c.pixels, field, found, z);
}

// The features of one tile: [block, row, (field, inner), pixel]. Lines of pixels follow one another
// without gaps: what a vector writes beyond the end of its line, the next line overwrites.
template <int R, int B>
APART void differentiate_as(const Job& j, const Cut& c, const Real* spectrum, int64_t row, int64_t rows,
                      int64_t columns, Real* z, void* scratch) {
  using W = Vec<B>;
  auto* found = static_cast<typename W::type*>(scratch);
  int64_t column[2 * R + 1], line[2 * R + 1];
  for (int t = 0; t < 2 * R + 1; t++) {
    const int64_t place = t * j.dilation;
    column[t] = (place % j.down) * c.phase_pitch + place / j.down;
  }
  for (int64_t field = 0; field < j.in_fields; field++)
    for (int64_t r = 0; r < rows; r++) {
      const Real* maps = spectrum + field * j.in_channels * c.map;
      for (int t = 0; t < 2 * R + 1; t++)
        line[t] = ((row + r) * j.down + t * j.dilation) % c.ring * c.pitch;
      Real* to = z + r * columns;
      int64_t p = 0;
      for (; p + W::lanes < columns; p += 2 * W::lanes)
        features_at<R, B, 2>(j, c, maps + p, line, column, field, to + p, found);
      if (p < columns)
        features_at<R, B, 1>(j, c, maps + p, line, column, field, to + p, found);
    }
}

template <int B>
void differentiate_with(const Job& j, const Cut& c, const Real* spectrum, int64_t row,
                        int64_t rows, int64_t columns, Real* z, void* scratch) {
  switch (j.size) {
    case 1: return differentiate_as<0, B>(j, c, spectrum, row, rows, columns, z, scratch);
    case 3: return differentiate_as<1, B>(j, c, spectrum, row, rows, columns, z, scratch);
    case 5: return differentiate_as<2, B>(j, c, spectrum, row, rows, columns, z, scratch);
    case 7: return differentiate_as<3, B>(j, c, spectrum, row, rows, columns, z, scratch);
    case 9: return differentiate_as<4, B>(j, c, spectrum, row, rows, columns, z, scratch);
  }
}

void differentiate(const Job& j, const Cut& c, const Real* spectrum, int64_t row, int64_t rows,
                   int64_t columns, Real* z, void* scratch) {
  constexpr int HALF = BYTES > 16 ? BYTES / 2 : BYTES;
  if (round_up(columns, LANES / 2) < round_up(columns, LANES))
    differentiate_with<HALF>(j, c, spectrum, row, rows, columns, z, scratch);
  else
    differentiate_with<BYTES>(j, c, spectrum, row, rows, columns, z, scratch);
}

// sums[r, pixels] = Σ_k packed[k, r] · z[k, pixels] for R rows and N vectors.
template <int R, int N>
APART void product(const Real* packed, const Real* z, int64_t z_step, int64_t inner, Real* out,
             int64_t out_step) {
  V sum[R][N] = {};
  for (int64_t k = 0; k < inner; k++) {
    V v[N];
    for (int n = 0; n < N; n++) v[n] = Full::load(z + n * LANES);
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) sum[r][n] += packed[r] * v[n];
    packed += R;
    z += z_step;
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) Full::store(out + r * out_step + n * LANES, sum[r][n]);
}

// sums[r, n] += Σ_p z[r, p] · other[p, n] for R rows and N vectors.
template <int R, int N>
APART void outer(const Real* z, int64_t z_step, const Real* other, int64_t other_step, int64_t pixels,
           Real* sums, int64_t sum_step) {
  V sum[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sum[r][n] = Full::load(sums + r * sum_step + n * LANES);
  for (int64_t p = 0; p < pixels; p++) {
    V v[N];
    for (int n = 0; n < N; n++) v[n] = Full::load(other + n * LANES);
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) sum[r][n] += z[r * z_step + p] * v[n];
    other += other_step;
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) Full::store(sums + r * sum_step + n * LANES, sum[r][n]);
}

// The instances of a kernel by its number of rows, 1 … TALL.
template <int N, int R = TALL>
void product_of(int64_t rows, const Real* a, const Real* z, int64_t s, int64_t k, Real* o,
                int64_t t) {
  if (rows == R) return product<R, N>(a, z, s, k, o, t);
  if constexpr (R > 1) product_of<N, R - 1>(rows, a, z, s, k, o, t);
}

template <int N, int R = TALL>
void outer_of(int64_t rows, const Real* z, int64_t s, const Real* b, int64_t t, int64_t p, Real* o,
              int64_t u) {
  if (rows == R) return outer<R, N>(z, s, b, t, p, o, u);
  if constexpr (R > 1) outer_of<N, R - 1>(rows, z, s, b, t, p, o, u);
}

int64_t tile_height(int64_t rows) { return ceil_div(rows, ceil_div(rows, TALL)); }

// The weights of a block in the order in which `multiply` reads them: [tile, (field, inner), row].
void pack(const Job& j, const Block& b, Real* packed) {
  const int64_t rows = b.columns * j.out_fields, height = tile_height(rows);
  for (int64_t first = 0; first < rows; first += height) {
    const int64_t here = std::min(height, rows - first);
    for (int64_t c = 0; c < j.in_fields; c++)
      for (int64_t k = 0; k < b.inner; k++)
        for (int64_t r = first; r < first + here; r++) {
          const int64_t place = b.weight + k * b.columns + r / j.out_fields;
          const int64_t pair = (r % j.out_fields) * j.in_fields + c;
          *packed++ = j.sign[place] * j.w[pair * j.weights + j.entry[place]];
        }
  }
}

// Every block's products for one tile: [slot, out field, pixel].
APART void multiply(const Job& j, const Cut& c, const Real* z, const Real* packed, int64_t pixels,
              Real* out) {
  const int64_t vectors = ceil_div(pixels, LANES);
  for (int64_t b = 0; b < j.blocks; b++) {
    const Block& block = j.block[b];
    const int64_t inner = block.inner * j.in_fields, rows = block.columns * j.out_fields;
    const int64_t height = tile_height(rows);
    for (int64_t row = 0; row < block.rows; row++) {
      for (int64_t first = 0; first < rows; first += height) {
        const int64_t here = std::min(height, rows - first);
        const Real* a = packed + first * inner;
        Real* o = out + first * c.pixels;
        int64_t v = 0;
        for (; v + 2 <= vectors; v += 2)
          product_of<2>(here, a, z + v * LANES, c.pixels, inner, o + v * LANES, c.pixels);
        if (v < vectors)
          product_of<1>(here, a, z + v * LANES, c.pixels, inner, o + v * LANES, c.pixels);
      }
      z += inner * c.pixels;
      out += rows * c.pixels;
    }
    packed += inner * rows;
  }
}

APART void synthesise(const Job& j, const Cut& c, const Real* products, int64_t image, int64_t top,
                int64_t left, int64_t rows, int64_t columns, Real* scratch) {
  const int64_t plane = j.out_height * j.out_width;
  const bool whole = columns == j.out_width;  // lines follow one another in the output too
  const int64_t lines = whole ? 1 : rows, length = whole ? rows * columns : columns;
  for (int64_t field = 0; field < j.out_fields; field++)
    for (int64_t r = 0; r < lines; r++) {
      Real* to = j.y + (image * j.out_fields + field) * j.out_channels * plane +
                 (top + r) * j.out_width + left;
      transform(j.synthesis, true, products + field * c.pixels + r * columns,
                j.out_fields * c.pixels, to, plane, length, true, false, scratch);
    }
}

// Each block's inner products of features and spectrum of `other`, added to `sums`:
// [block, (field, inner), (column, out field) padded to whole vectors].
APART void correlate(const Job& j, const Cut& c, const Real* z, int64_t image, int64_t top, int64_t left,
               int64_t rows, int64_t columns, Real* spectrum, Real* turned, Real* sums, Real* scratch) {
  const int64_t plane = j.out_height * j.out_width, pixels = rows * columns;
  const Real* other = j.other + image * j.other_stride;
  const bool whole = columns == j.out_width;
  const int64_t lines = whole ? 1 : rows, length = whole ? pixels : columns;
  for (int64_t field = 0; field < j.out_fields; field++)
    for (int64_t r = 0; r < lines; r++)
      transform(j.synthesis, false,
                other + field * j.out_channels * plane + (top + r) * j.out_width + left, plane,
                spectrum + field * c.pixels + r * columns, j.out_fields * c.pixels, length, false,
                true, scratch);
  for (int64_t b = 0; b < j.blocks; b++) {
    const Block& block = j.block[b];
    const int64_t inner = block.inner * j.in_fields, wide = block.columns * j.out_fields;
    const int64_t padded = round_up(wide, LANES), height = tile_height(inner);
    for (int64_t row = 0; row < block.rows; row++) {
      for (int64_t p = 0; p < pixels; p++)
        for (int64_t n = 0; n < wide; n++) turned[p * padded + n] = spectrum[n * c.pixels + p];
      for (int64_t n = 0; n < padded; n += 2 * LANES)
        for (int64_t first = 0; first < inner; first += height) {
          const int64_t here = std::min(height, inner - first);
          const Real* a = z + first * c.pixels;
          Real* o = sums + first * padded + n;
          if (n + LANES < padded)
            outer_of<2>(here, a, c.pixels, turned + n, padded, pixels, o, padded);
          else
            outer_of<1>(here, a, c.pixels, turned + n, padded, pixels, o, padded);
        }
      z += inner * c.pixels;
      spectrum += wide * c.pixels;
    }
    sums += inner * padded;
  }
}

template <class Body>
void in_parallel(int64_t threads, const Body& body) {
#ifdef _OPENMP
#pragma omp parallel num_threads(static_cast<int>(threads))
  body(omp_get_thread_num());
#else
  std::vector<std::thread> pool;
  for (int64_t t = 1; t < threads; t++) pool.emplace_back([&body, t] { body(t); });
  body(0);
  for (auto& thread : pool) thread.join();
#endif
}

}  // namespace

// 0: done. 1: the structure has another layout. 2: a size that has no kernel. 3: no memory.
extern "C" int econv_spectral(const Job* job) {
  const Job& j = *job;
  if (j.size_of_job != static_cast<int64_t>(sizeof(Job))) return 1;
  if (j.size % 2 == 0 || j.size > 9) return 2;
  const Cut c = cut_up(j);
  const int64_t regions = j.batch * c.down * c.across;
  const int64_t threads = std::max<int64_t>(1, std::min(j.threads, regions));
  int64_t matrices = 0, sums_size = 0, widest = 0, features = 0;
  for (int64_t b = 0; b < j.blocks; b++) {
    const Block& block = j.block[b];
    const int64_t wide = block.columns * j.out_fields, inner = block.inner * j.in_fields;
    matrices += inner * wide;
    sums_size += inner * round_up(wide, LANES);
    widest = std::max(widest, round_up(wide, LANES));
    features += block.rows * inner;
  }
  static thread_local Scratch shared_packed, shared_sums;
  Real* packed = shared_packed.take(matrices);
  Real* all_sums = shared_sums.take(j.w_gradient ? sums_size * threads : 1);
  if (!packed || !all_sums) return 3;
  // For all threads: fewer may come than are asked for.
  if (j.w_gradient) std::memset(all_sums, 0, sums_size * threads * sizeof(Real));
  {
    Real* to = packed;
    for (int64_t b = 0; b < j.blocks; b++) {
      pack(j, j.block[b], to);
      to += j.block[b].inner * j.in_fields * j.block[b].columns * j.out_fields;
    }
  }
  const int64_t spectrum_size = j.in_fields * j.in_channels * c.map + 2 * LANES;
  const int64_t z_size = features * c.pixels, product_size = j.slots * j.out_fields * c.pixels;
  const int64_t line_size = j.in_channels * (round_up(j.width, LANES) + 2 * LANES);
  const int64_t most = std::max(j.in_channels * j.stencils, j.out_channels + j.slots);
  const int64_t found_size = std::max(most, j.in_channels * 2) * 2 * LANES;
  const int64_t turned_size = j.w_gradient ? c.pixels * widest : 0;
  // Whole vectors for each part, so that all of them are aligned.
  const int64_t sizes[] = {spectrum_size, z_size, product_size, line_size, found_size, turned_size};
  int64_t total = 0;
  for (int64_t s : sizes) total += round_up(s, 64);
  std::vector<int> failed(threads, 0);
  in_parallel(threads, [&](int64_t thread) {
    static thread_local Scratch scratch;
    Real* part = scratch.take(total);
    failed[thread] = !part;
    Real* buffers[6] = {};
    for (int i = 0; part && i < 6; i++) {
      buffers[i] = part;
      part += round_up(sizes[i], 64);
    }
    Real *spectrum = buffers[0], *z = buffers[1], *products = buffers[2], *line = buffers[3];
    Real* sums = all_sums + thread * sums_size;
    if (part && j.w_gradient) std::memset(buffers[5], 0, turned_size * sizeof(Real));
    auto work = [&](int64_t region) {
      const int64_t image = region / (c.down * c.across), rest = region % (c.down * c.across);
      const int64_t top = rest / c.across * c.region_rows, left = rest % c.across * c.region_columns;
      const int64_t rows = std::min(c.region_rows, j.out_height - top);
      const int64_t columns = std::min(c.region_columns, j.out_width - left);
      int64_t known = 0;  // lines of the spectrum
      for (int64_t row = 0; row < rows; row += c.tile_rows) {
        const int64_t here = std::min(c.tile_rows, rows - row);
        const int64_t last = (row + here - 1) * j.down + j.dilation * (j.size - 1) + 1;
        known = std::max(known, row * j.down);
        analyse(j, c, j.x + image * j.x_stride, top, left, known, last, spectrum, line, buffers[4]);
        known = last;
        differentiate(j, c, spectrum, row, here, columns, z, buffers[4]);
        if (j.y) {
          multiply(j, c, z, packed, here * columns, products);
          synthesise(j, c, products, image, top + row, left, here, columns, buffers[4]);
        }
        if (j.w_gradient)
          correlate(j, c, z, image, top + row, left, here, columns, products, buffers[5], sums,
                    buffers[4]);
      }
    };
#ifdef _OPENMP
    // Always the same regions for a thread, so that sums over pixels have one order.
#pragma omp for schedule(static)
    for (int64_t region = 0; region < regions; region++)
      if (!failed[thread]) work(region);
#else
    const int64_t first = regions * thread / threads, stop = regions * (thread + 1) / threads;
    for (int64_t region = first; !failed[thread] && region < stop; region++) work(region);
#endif
  });
  for (int f : failed)
    if (f) return 3;
  if (!j.w_gradient) return 0;
  std::memset(j.w_gradient, 0, j.out_fields * j.in_fields * j.weights * sizeof(Real));
  int64_t start = 0;
  for (int64_t b = 0; b < j.blocks; b++) {
    const Block& block = j.block[b];
    const int64_t padded = round_up(block.columns * j.out_fields, LANES);
    for (int64_t f = 0; f < j.in_fields; f++)
      for (int64_t k = 0; k < block.inner; k++, start += padded)
        for (int64_t n = 0; n < block.columns; n++) {
          const int64_t place = block.weight + k * block.columns + n;
          for (int64_t o = 0; o < j.out_fields; o++) {
            Real sum = 0;
            for (int64_t t = 0; t < threads; t++)
              sum += all_sums[t * sums_size + start + n * j.out_fields + o];
            j.w_gradient[(o * j.in_fields + f) * j.weights + j.entry[place]] += j.sign[place] * sum;
          }
        }
  }
  return 0;
}
