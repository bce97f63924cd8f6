// The spectral engine on a CPU: a tile of pixels at a time, so that derivatives stay in the cache.
//
// The steps are those of econv.plan. For every tile: the spectrum of the input and a rim around it
// (analyse), its derivatives combined to features (differentiate), one matrix product for a block
// (multiply), and back to channels. With `other`, an image of the output's shape, also the inner
// products of every feature with every slot of its spectrum: the gradient to the weights.
//
// REAL is float or double. Pixels run along the vectors; images are [batch, channels, row, column],
// and volumes have slices before the rows: their tiles are rows of one slice.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

using Real = REAL;

#if defined(__AVX512F__)
constexpr int BYTES = 64, TALL = 12;  // of a vector; rows of accumulators, two vectors each
#elif defined(__AVX__)
constexpr int BYTES = 32, TALL = 6;
#elif defined(__aarch64__)
constexpr int BYTES = 16, TALL = 12;
#else
constexpr int BYTES = 16, TALL = 6;
#endif
constexpr int LANES = BYTES / static_cast<int>(sizeof(Real));
constexpr int AHEAD = 8;  // vectors that are fetched before they are read
constexpr int64_t Z_BYTES = 400 << 10;  // features of one tile
constexpr int64_t SLICES_BYTES = 2 << 20;  // spectrum of a volume's region

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

struct Block { int64_t rows, inner, columns; };

struct Sparse {
  int64_t rows;
  const int64_t *start, *column;  // where each row's entries start
  const Real* factor;
};

// A matrix as three: the first gives values; of pairs of values, one after the other, the sum and
// the difference are taken; the last reads the values.
struct Transform {
  Sparse first;
  int64_t pairs;
  const int64_t* pair;
  Sparse last;
};

// What econv.engines.spectral.native gives, as one array of 64-bit numbers and addresses.
struct Job {
  int64_t dimension, size, stencils, slots, weights, blocks;  // slots: those that blocks write
  int64_t in_channels, out_channels;                            // of one field
  Transform analysis;   // channels of an input field to its spectrum
  Transform synthesis;  // slots of the blocks to channels of an output field …
  Transform spectrum;   // … and its transpose
  const int64_t* class_start;    // [7], in space [9], into entries: stencils by their symmetry
  const int64_t* class_stencil;  // of each entry
  const int64_t* class_adds;     // whether it adds to what an earlier class gave
  const Real* class_factor;      // its factors, as many as its class has parts
  const int64_t* feature_start;   // where the terms of each feature start
  const int64_t* feature_offset;  // of each term, into in_channels × stencils
  const Real* feature_factor;     // as many
  const Block* block;
  const int64_t* entry;  // which weight stands where, block after block: [inner, columns]
  const Real* sign;
  int64_t up, down, dilation, before, out_depth, out_height, out_width;
  int64_t threads, batch, depth, height, width, in_fields, out_fields;
  int64_t x_stride, other_stride;  // from one image to the next
  const Real *x, *w, *other;
  Real *y, *w_gradient;  // each may be missing; the latter is added to
};

// Inlined into one another these functions run out of registers.
#define APART __attribute__((noinline))
#define WITHIN inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Calls the instance of a kernel for a number between FIRST and LAST.
template <int FIRST, int LAST, class Body>
WITHIN void instance(int64_t number, const Body& body) {
  if (number == FIRST) return body(std::integral_constant<int, FIRST>{});
  if constexpr (FIRST < LAST) instance<FIRST + 1, LAST>(number, body);
}

// How the output is cut up: regions go to threads; within one, tiles follow one another downwards,
// and of the spectrum only those lines are kept that the current tile reads; of volumes those slices.
struct Cut {
  int64_t region_slices, region_rows, region_columns, across, down, back, tile_rows;
  int64_t pitch, phase_pitch, ring, map;  // lines, and how many, of one map of the spectrum
  int64_t slice_pitch, slice_ring;        // its slices, of so many lines
  int64_t pixels;                         // row length of the features
  int64_t features = 0, matrices = 0, widest = 0;  // for all fields
};

Cut cut_up(const Job& j) {
  Cut c;
  for (const Block* b = j.block; b < j.block + j.blocks; b++) {
    const int64_t padded = round_up(b->columns * j.out_fields, LANES);
    c.features += b->rows * b->inner * j.in_fields;
    c.matrices += b->inner * j.in_fields * padded;
    c.widest = std::max(c.widest, padded);
  }
  const int64_t reach = j.dilation * (j.size - 1);
  const int64_t each = c.features * static_cast<int64_t>(sizeof(Real));
  const int64_t fits = std::max<int64_t>(2 * LANES, Z_BYTES / std::max<int64_t>(1, each));
  c.across = ceil_div(j.out_width, fits);
  c.region_columns = ceil_div(j.out_width, c.across);
  if (c.across > 1) c.region_columns = round_up(c.region_columns, LANES);
  c.across = ceil_div(j.out_width, c.region_columns);
  c.tile_rows = std::min(j.out_height, std::max<int64_t>(1, fits / c.region_columns));
  // Vectors reach beyond the end of a line, and read what follows without using it.
  c.phase_pitch = round_up(c.region_columns, LANES) + reach / j.down + 1;
  c.pitch = c.phase_pitch * j.down;
  // Enough regions for all threads, if the rim above and below does not outweigh them.
  const int64_t wanted = ceil_div(4 * j.threads, j.batch * c.across);
  const int64_t least = std::max<int64_t>(8, 2 * reach);
  if (j.dimension == 2) {
    c.region_slices = 1;
    c.region_rows = std::max(ceil_div(j.out_height, wanted), std::min(least, j.out_height));
    c.region_rows = std::min(j.out_height, round_up(c.region_rows, c.tile_rows));
    c.ring = (c.tile_rows - 1) * j.down + reach + 1;
    c.slice_ring = 1;
  } else {  // All rows of some slices are kept, if they fit.
    c.slice_ring = reach + 1;
    const int64_t line = j.in_fields * j.in_channels * c.slice_ring * c.pitch * sizeof(Real);
    const int64_t kept = std::max((SLICES_BYTES / line - reach) / j.down, 2 * least);
    c.region_rows = ceil_div(j.out_height, ceil_div(j.out_height, kept));
    c.ring = (c.region_rows - 1) * j.down + reach + 1;
    c.region_slices = std::max(ceil_div(j.out_depth, wanted), std::min(least, j.out_depth));
  }
  c.down = ceil_div(j.out_height, c.region_rows);
  c.back = ceil_div(j.out_depth, c.region_slices);
  c.slice_pitch = c.ring * c.pitch;
  c.map = c.slice_ring * c.slice_pitch + 2 * LANES;
  // The last line may be written up to a whole vector.
  c.pixels = (c.tile_rows - 1) * c.region_columns + round_up(c.region_columns, LANES);
  c.pixels = round_up(c.pixels, LANES);
  return c;
}

// N vectors of pixels of maps that are `in_step` and `out_step` apart. A single vector is read and
// written as far as it can be.
template <int N>
APART void transform_some(const Transform& t, const Real* in, int64_t in_step, int64_t readable,
                          Real* out, int64_t out_step, int64_t writable, V* value) {
  V sum[N];
  const auto add_up = [&](const Sparse& m, int64_t row, const auto& read) {
    for (int n = 0; n < N; n++) sum[n] = V{};
    for (int64_t e = m.start[row]; e < m.start[row + 1]; e++)
      for (int n = 0; n < N; n++) sum[n] += m.factor[e] * read(m.column[e], n);
  };
  for (int64_t p = 0; p < t.first.rows; p++) {
    // Many streams at a time, more than the processor follows by itself.
    for (int n = 0; n < N; n++) __builtin_prefetch(in + p * in_step + (n + AHEAD) * LANES);
    add_up(t.first, p, [&](int64_t map, int n) {
      const Real* from = in + map * in_step + n * LANES;
      if (N > 1 || readable >= LANES) return Full::load(from);
      V some = {};
      std::memcpy(&some, from, readable * sizeof(Real));
      return some;
    });
    for (int n = 0; n < N; n++) value[p * N + n] = sum[n];
  }
  for (int64_t p = 0; p < t.pairs; p++) {
    V *a = value + t.pair[2 * p] * N, *b = value + t.pair[2 * p + 1] * N;
    for (int n = 0; n < N; n++) {
      const V gap = a[n] - b[n];
      a[n] += b[n];
      b[n] = gap;
    }
  }
  for (int64_t r = 0; r < t.last.rows; r++) {
    add_up(t.last, r, [&](int64_t p, int n) { return value[p * N + n]; });
    Real* to = out + r * out_step;
    if (N > 1 || writable >= LANES)
      for (int n = 0; n < N; n++) Full::store(to + n * LANES, sum[n]);
    else
      std::memcpy(to, sum, writable * sizeof(Real));
  }
}

void transform(const Transform& t, int64_t count, const Real* in, int64_t in_step,
               int64_t readable, Real* out, int64_t out_step, int64_t writable, Real* scratch) {
  for (int64_t p = 0, two; p < count; p += two ? 2 * LANES : LANES) {
    two = count - p > LANES && std::min(readable, writable) - p >= 2 * LANES;
    const auto some = two ? transform_some<2> : transform_some<1>;
    some(t, in + p, in_step, readable - p, out + p, out_step, writable - p,
         reinterpret_cast<V*>(scratch));
  }
}

// Some lines of the spectrum of a region, counted from the first that it reads: [field, slot, slice,
// line, phase, column]. Column c of the padded, spread line lies at phase c % down, offset c / down, so
// that strided reads are dense; line l lies at l % ring, a slice likewise.
APART void analyse(const Job& j, const Cut& c, const Real* image, int64_t front, int64_t slice,
                   int64_t top, int64_t left, int64_t from, int64_t to, Real* spectrum, Real* line,
                   Real* scratch) {
  const int64_t plane = j.depth * j.height * j.width;
  const int64_t deep = j.dimension == 2 ? 0 : front * j.down - j.before + slice;
  const bool empty = deep < 0 || deep % j.up || deep / j.up >= j.depth;
  const int64_t first_row = top * j.down - j.before, first = left * j.down - j.before;
  const int64_t needed = (c.region_columns - 1) * j.down + j.dilation * (j.size - 1) + 1;
  // Source columns whose offset `column * up - first` lies within the needed ones.
  const int64_t begin = first > 0 ? ceil_div(first, j.up) : 0;
  const int64_t end = std::min(j.width, needed + first > 0 ? ceil_div(needed + first, j.up) : 0);
  const int64_t length = end - begin, start = begin * j.up - first;
  const bool plain = j.up == 1 && j.down == 1;
  for (int64_t field = 0; field < j.in_fields; field++)
    for (int64_t l = from; l < to; l++) {
      const int64_t spread = first_row + l;
      Real* target = spectrum + field * j.in_channels * c.map + slice % c.slice_ring * c.slice_pitch
                     + l % c.ring * c.pitch;
      for (int64_t slot = 0; slot < j.in_channels; slot++)
        std::memset(target + slot * c.map, 0, c.pitch * sizeof(Real));
      if (length <= 0 || spread < 0 || spread % j.up || spread / j.up >= j.height) continue;
      if (empty) continue;
      const int64_t lines_before = deep / j.up * j.height + spread / j.up;
      const int64_t at = field * j.in_channels * plane + lines_before * j.width + begin;
      const int64_t readable = ((j.in_fields - 1) * j.in_channels + 1) * plane - at;
      transform(j.analysis, length, image + at, plane, readable, plain ? target + start : line,
                plain ? c.map : j.width, length, scratch);
      for (int64_t slot = 0; !plain && slot < j.in_channels; slot++)
        for (int64_t u = 0; u < length; u++) {
          const int64_t offset = start + u * j.up;
          target[slot * c.map + offset % j.down * c.phase_pitch + offset / j.down] =
              line[slot * j.width + u];
        }
    }
}

// Those derivatives of one map whose stencils have terms in one class of symmetric parts.
template <int M, class U>
WITHIN void add_class(const Job& j, int which, const Real*& factor, const U* part, U* found,
                      int64_t step) {
  for (int64_t e = j.class_start[which]; e < j.class_start[which + 1]; e++, factor += M) {
    U sum = U{};
    UNROLL for (int m = 0; m < M; m++) sum += factor[m] * part[m];
    U* to = found + j.class_stencil[e] * step;
    *to = j.class_adds[e] ? *to + sum : sum;
  }
}

// The classes of parts even (0) or odd (1) along y and along x, from columns that are so along x.
template <int Y, int X, int R, class U>
WITHIN void add_parts(const Job& j, int which, const Real*& factor,
                      const U (&column)[2 * R + 1][R + 1], U* found, int64_t step) {
  U both[R + 1][R + 1], sums[(R + 1) * (R + 1)], gaps[(R + 1) * (R + 1)];
  int s = 0, g = 0;
  UNROLL for (int a = Y; a <= R; a++)
    UNROLL for (int i = X; i <= R; i++) {
      both[a][i] = column[R + a][i];
      if (a) both[a][i] += Y ? -column[R - a][i] : column[R - a][i];
    }
  if constexpr (Y == X) {
    UNROLL for (int a = Y; a <= R; a++) {
      sums[s++] = both[a][a];
      UNROLL for (int b = a + 1; b <= R; b++) {
        sums[s++] = both[a][b] + both[b][a];
        gaps[g++] = both[a][b] - both[b][a];
      }
    }
    constexpr int N = R + 1 - Y;
    add_class<N * (N + 1) / 2>(j, which, factor, sums, found, step);
    add_class<N * (N - 1) / 2>(j, which + 1, factor, gaps, found, step);
  } else {
    UNROLL for (int odd = 1; odd <= R; odd++)
      UNROLL for (int even = 0; even <= R; even++)
        sums[s++] = Y ? both[odd][even] : both[even][odd];
    add_class<R * (R + 1)>(j, which, factor, sums, found, step);
  }
}

// The derivatives of one map at one vector of pixels, from the symmetric parts of the patch that
// `symmetry_classes` in native.py describes.
template <int R, int B>
APART void derivatives(const Real* at, const int64_t* row, const int64_t* column, const Job& j,
                       typename Vec<B>::type* found, int64_t step) {
  typename Vec<B>::type even[2 * R + 1][R + 1], odd[2 * R + 1][R + 1];  // along x, for every row
  UNROLL for (int r = 0; r <= 2 * R; r++) {
    even[r][0] = Vec<B>::load(at + row[r] + column[R]);
    UNROLL for (int i = 1; i <= R; i++) {
      const auto right = Vec<B>::load(at + row[r] + column[R + i]);
      const auto left = Vec<B>::load(at + row[r] + column[R - i]);
      even[r][i] = right + left;
      odd[r][i] = right - left;
    }
  }
  const Real* factor = j.class_factor;
  add_parts<0, 0, R>(j, 0, factor, even, found, step);
  if constexpr (R > 0) {
    add_parts<1, 0, R>(j, 2, factor, even, found, step);
    add_parts<0, 1, R>(j, 3, factor, odd, found, step);
    add_parts<1, 1, R>(j, 4, factor, odd, found, step);
  }
}

// The class of parts that are even (0) or odd (1) along z, y and x.
template <int Z, int Y, int X, int R, class U>
WITHIN void add_cube(const Job& j, const Real*& factor, const U (&plane)[2 * R + 1][R + 1][R + 1],
                     U* found, int64_t step) {
  constexpr int M = (R + 1 - Z) * (R + 1 - Y) * (R + 1 - X);
  U part[M + 1];
  int m = 0;
  UNROLL for (int a = Z; a <= R; a++)
    UNROLL for (int b = Y; b <= R; b++)
      UNROLL for (int i = X; i <= R; i++) {
        part[m] = plane[R + a][b][i];
        if (a) part[m] += Z ? -plane[R - a][b][i] : plane[R - a][b][i];
        m++;
      }
  add_class<M>(j, 4 * Y + 2 * X + Z, factor, part, found, step);
}

// From lines that are even or odd along x, planes that are so along y too, and their two classes.
template <int Y, int X, int R, class U>
WITHIN void add_planes(const Job& j, const Real*& factor,
                       const U (&line)[2 * R + 1][2 * R + 1][R + 1], U* found, int64_t step) {
  U plane[2 * R + 1][R + 1][R + 1];
  UNROLL for (int s = 0; s <= 2 * R; s++)
    UNROLL for (int b = Y; b <= R; b++)
      UNROLL for (int i = X; i <= R; i++) {
        plane[s][b][i] = line[s][R + b][i];
        if (b) plane[s][b][i] += Y ? -line[s][R - b][i] : line[s][R - b][i];
      }
  add_cube<0, Y, X, R>(j, factor, plane, found, step);
  add_cube<1, Y, X, R>(j, factor, plane, found, step);
}

// As `derivatives`, of a volume: its eight classes.
template <int R, int B>
APART void derivatives_in_space(const Real* at, const int64_t* slice, const int64_t* row,
                                const int64_t* column, const Job& j,
                                typename Vec<B>::type* found, int64_t step) {
  typename Vec<B>::type even[2 * R + 1][2 * R + 1][R + 1], odd[2 * R + 1][2 * R + 1][R + 1];
  UNROLL for (int s = 0; s <= 2 * R; s++)
    UNROLL for (int r = 0; r <= 2 * R; r++) {
      const Real* line = at + slice[s] + row[r];
      even[s][r][0] = Vec<B>::load(line + column[R]);
      UNROLL for (int i = 1; i <= R; i++) {
        const auto right = Vec<B>::load(line + column[R + i]);
        const auto left = Vec<B>::load(line + column[R - i]);
        even[s][r][i] = right + left;
        odd[s][r][i] = right - left;
      }
    }
  const Real* factor = j.class_factor;
  add_planes<0, 0, R>(j, factor, even, found, step);
  if constexpr (R > 0) {
    add_planes<0, 1, R>(j, factor, odd, found, step);
    add_planes<1, 0, R>(j, factor, even, found, step);
    add_planes<1, 1, R>(j, factor, odd, found, step);
  }
}

// One field's features at N vectors of pixels, from its derivatives.
template <int B, int N>
APART void combine(const Job& j, int64_t pixels, int64_t field, const typename Vec<B>::type* found,
                   Real* z) {
  const int64_t *start = j.feature_start, *offset = j.feature_offset;
  const Real* factor = j.feature_factor;
  for (const Block* b = j.block; b < j.block + j.blocks; b++)
    for (int64_t r = 0; r < b->rows; r++, z += b->inner * j.in_fields * pixels) {
      Real* to = z + field * b->inner * pixels;
      for (const int64_t* end = start + b->inner; start < end; start++, to += pixels) {
        typename Vec<B>::type sum[N];
        for (int n = 0; n < N; n++) sum[n] = *factor * found[*offset * N + n];
        factor++, offset++;
        for (int64_t t = start[0] + 1; t < start[1]; t++, factor++, offset++)
          for (int n = 0; n < N; n++) sum[n] += *factor * found[*offset * N + n];
        for (int n = 0; n < N; n++) Vec<B>::store(to + n * Vec<B>::lanes, sum[n]);
      }
    }
}

// Where the taps of a stencil lie, from the first that the first pixel of a line reads.
template <int R>
struct Taps {
  int64_t slice[2 * R + 1], line[2 * R + 1], column[2 * R + 1];
};

// The features of the pixels of one line, from the first on, of one field.
template <int D, int R, int B>
WITHIN void differentiate_line(const Job& j, const Cut& c, const Taps<R>& taps, const Real* map,
                               int64_t first, int64_t columns, int64_t field, Real* z,
                               Real* scratch) {
  constexpr int lanes = Vec<B>::lanes;
  auto* found = reinterpret_cast<typename Vec<B>::type*>(scratch);
  for (int64_t p = first; p < columns; p += 2 * lanes)
    instance<1, 2>(p + lanes < columns ? 2 : 1, [&](auto vectors) {
      constexpr int N = decltype(vectors)::value;
      const Real* at = map + p;
      for (int64_t slot = 0; slot < j.in_channels; slot++, at += c.map)
        for (int n = 0; n < N; n++) {
          const Real* from = at + n * lanes;
          auto* to = found + slot * j.stencils * N + n;
          if constexpr (D == 2) derivatives<R, B>(from, taps.line, taps.column, j, to, N);
          else derivatives_in_space<R, B>(from, taps.slice, taps.line, taps.column, j, to, N);
        }
      combine<B, N>(j, c.pixels, field, found, z + p);
    });
}

// The features of one tile: [block, row, (field, inner), pixel]. Lines of pixels follow one another
// without gaps: what a vector writes beyond the end of its line, the next line overwrites.
template <int D, int R>
APART void differentiate(const Job& j, const Cut& c, const Real* spectrum, int64_t deep,
                         int64_t row, int64_t rows, int64_t columns, Real* z, Real* scratch) {
  constexpr int HALF = BYTES > 16 ? BYTES / 2 : BYTES;
  const int64_t whole = columns / LANES * LANES;
  const bool narrow = round_up(columns, LANES / 2) < round_up(columns, LANES);
  Taps<R> taps;
  for (int t = 0; t <= 2 * R; t++) {
    taps.column[t] = t * j.dilation % j.down * c.phase_pitch + t * j.dilation / j.down;
    taps.slice[t] = (deep * j.down + t * j.dilation) % c.slice_ring * c.slice_pitch;
  }
  for (int64_t field = 0; field < j.in_fields; field++)
    for (int64_t r = 0; r < rows; r++) {
      for (int t = 0; t <= 2 * R; t++)
        taps.line[t] = ((row + r) * j.down + t * j.dilation) % c.ring * c.pitch;
      const Real* map = spectrum + field * j.in_channels * c.map;
      const auto line = [&](auto bytes, int64_t first, int64_t last) {
        constexpr int B = decltype(bytes)::value;
        differentiate_line<D, R, B>(j, c, taps, map, first, last, field, z + r * columns, scratch);
      };
      // What is left over takes half a vector, if that is enough; of images the whole line.
      const int64_t full = !narrow ? columns : D == 2 ? 0 : whole;
      line(std::integral_constant<int, BYTES>{}, 0, full);
      line(std::integral_constant<int, HALF>{}, full, columns);
    }
}

// out[r, n] = Σ_k a[k, r] · b[k, n] for R rows and N vectors; turned, += and a is [r, k].
template <bool TURNED, int R, int N>
APART void product(const Real* a, int64_t a_step, const Real* b, int64_t b_step, int64_t inner,
                   Real* out, int64_t out_step) {
  V sum[R][N] = {};
  for (int r = 0; TURNED && r < R; r++)
    for (int n = 0; n < N; n++) sum[r][n] = Full::load(out + r * out_step + n * LANES);
  for (int64_t k = 0; k < inner; k++) {
    V v[N];
    for (int n = 0; n < N; n++) v[n] = Full::load(b + n * LANES);
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) sum[r][n] += a[TURNED ? r * a_step : r] * v[n];
    a += TURNED ? 1 : R;
    b += b_step;
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) Full::store(out + r * out_step + n * LANES, sum[r][n]);
}

// Rows that `product` takes at a time, of so many.
int64_t tile_height(int64_t rows) { return ceil_div(rows, ceil_div(rows, TALL)); }

// The same for any number of rows and columns; a is [tile of rows, k, r] or turned [r, k].
template <bool TURNED>
void products(int64_t rows, int64_t columns, const Real* a, int64_t a_step, const Real* b,
              int64_t b_step, int64_t inner, Real* out, int64_t out_step) {
  const int64_t height = tile_height(rows), width = 2 * LANES;
  // The features stream by, what they are multiplied with is kept.
  for (int64_t u = 0; u < (TURNED ? columns : rows); u += TURNED ? width : height)
    for (int64_t v = 0; v < (TURNED ? rows : columns); v += TURNED ? height : width) {
      const int64_t first = TURNED ? v : u, n = TURNED ? u : v;
      instance<1, TALL>(std::min(height, rows - first), [&](auto tall) {
        constexpr int R = decltype(tall)::value;
        const auto some = n + LANES < columns ? product<TURNED, R, 2> : product<TURNED, R, 1>;
        some(a + first * a_step, a_step, b + n, b_step, inner, out + first * out_step + n,
             out_step);
      });
    }
}

// Every block's products for one tile, [slot, out field, pixel]. What stood there, the spectrum of
// `other`, gives with the features their inner products, which are added to `sums`.
APART void multiply(const Job& j, const Cut& c, const Real* z, const Real* matrix, int64_t pixels,
                    Real* out, Real* turned, Real* sums) {
  for (const Block* b = j.block; b < j.block + j.blocks; b++) {
    const int64_t inner = b->inner * j.in_fields, wide = b->columns * j.out_fields;
    const int64_t padded = round_up(wide, LANES);
    for (int64_t row = 0; row < b->rows; row++) {
      if (j.w_gradient) {
        for (int64_t p = 0; p < pixels; p++)
          for (int64_t n = 0; n < wide; n++) turned[p * padded + n] = out[n * c.pixels + p];
        products<true>(inner, padded, z, c.pixels, turned, padded, pixels, sums, padded);
      }
      if (j.y) products<false>(wide, pixels, matrix, inner, z, c.pixels, inner, out, c.pixels);
      z += inner * c.pixels;
      out += wide * c.pixels;
    }
    matrix += inner * padded;
    sums += inner * padded;
  }
}

// All entries of the blocks' matrices, [block, (field, inner), (column, out field)]: where each
// stands, in tiles or with rows padded to whole vectors, where its weight does, and its sign.
template <bool TILED, class Visit>
void each_entry(const Job& j, const Visit& visit) {
  int64_t at = 0, offset = 0;
  for (const Block* b = j.block; b < j.block + j.blocks; b++) {
    const int64_t inner = b->inner * j.in_fields, wide = b->columns * j.out_fields;
    const int64_t padded = round_up(wide, LANES), height = TILED ? tile_height(wide) : padded;
    for (int64_t row = 0, f = 0; f < j.in_fields; f++)
      for (int64_t k = 0; k < b->inner; k++, row++) {
        int64_t r = 0, next = height, base = at + row * height;  // of the tile
        for (int64_t n = 0; n < b->columns; n++) {
          const int64_t entry = offset + k * b->columns + n, weight = f * j.weights + j.entry[entry];
          const Real sign = j.sign[entry];
          for (int64_t o = 0; o < j.out_fields; o++, r++) {
            if (TILED && r == next) {
              base = at + r * inner + row * std::min(height, wide - r) - r;
              next += height;
            }
            visit(base + r, o * j.in_fields * j.weights + weight, sign);
          }
        }
      }
    at += inner * padded;
    offset += b->inner * b->columns;
  }
}

}  // namespace

// 0: done. 1: the job has another layout. 2: a size that has no kernel. 3: no memory.
extern "C" int econv_spectral(const Job* job, int64_t count) {
  const Job& j = *job;
  if (count * sizeof(int64_t) != sizeof(Job)) return 1;
  if (j.size % 2 == 0 || j.size > (j.dimension == 2 ? 9 : 5)) return 2;
  const Cut c = cut_up(j);
  const int64_t each = c.back * c.down * c.across, regions = j.batch * each;
  const int64_t threads = std::max<int64_t>(1, std::min(j.threads, regions));
  const int64_t most = std::max({j.in_channels * j.stencils, j.in_channels, j.out_channels});
  // What each thread holds, how much of it and where.
  enum { SPECTRUM, Z, PRODUCTS, LINE, SCRATCH, TURNED, SUMS, ALL };
  const int64_t sizes[ALL] = {j.in_fields * j.in_channels * c.map + 2 * LANES,
                              c.features * c.pixels,
                              j.slots * j.out_fields * c.pixels,
                              j.in_channels * j.width,
                              most * 2 * LANES,
                              j.w_gradient ? c.pixels * c.widest : 0,
                              j.w_gradient ? c.matrices : 0};
  int64_t starts[ALL + 1] = {};
  for (int i = 0; i < ALL; i++) starts[i + 1] = starts[i] + round_up(sizes[i], 64);
  const int64_t wanted = starts[ALL] * threads + c.matrices + 64;
  // Kept from call to call: fresh pages cost as much as the arithmetic.
  static thread_local std::vector<Real> memory;
  if (static_cast<int64_t>(memory.size()) < wanted) try {
      memory = std::vector<Real>();
      memory.resize(wanted);
    } catch (...) {
      return 3;
    }
  Real* const all = reinterpret_cast<Real*>(round_up(reinterpret_cast<int64_t>(memory.data()), 64));
  Real* const matrices = all + starts[ALL] * threads;
  each_entry<true>(j, [&](int64_t at, int64_t weight, Real sign) {
    matrices[at] = sign * j.w[weight];
  });

  // Always the same regions in one part, so that sums over pixels have one order.
  const auto work = [&](int64_t part) {
    Real* own[ALL];
    for (int i = 0; i < ALL; i++) own[i] = all + part * starts[ALL] + starts[i];
    std::memset(own[SUMS], 0, sizes[SUMS] * sizeof(Real));
    const int64_t stop = regions * (part + 1) / threads;
    for (int64_t region = regions * part / threads; region < stop; region++) {
      const int64_t image = region / each, rest = region % (c.down * c.across);
      const int64_t front = region % each / (c.down * c.across) * c.region_slices;
      const int64_t top = rest / c.across * c.region_rows;
      const int64_t left = rest % c.across * c.region_columns;
      const int64_t slices = std::min(c.region_slices, j.out_depth - front);
      const int64_t rows = std::min(c.region_rows, j.out_height - top);
      const int64_t columns = std::min(c.region_columns, j.out_width - left);
      const int64_t reach = j.dilation * (j.size - 1);
      // Lines and slices of the spectrum that are known.
      for (int64_t slice = 0, deep = 0; slice < slices; slice++)
      for (int64_t row = 0, known = 0; row < rows; row += c.tile_rows) {
        const int64_t here = std::min(c.tile_rows, rows - row);
        const auto read = [&](int64_t which, int64_t from, int64_t to) {
          analyse(j, c, j.x + image * j.x_stride, front, which, top, left, from, to, own[SPECTRUM],
                  own[LINE], own[SCRATCH]);
        };
        const int64_t last = (row + here - 1) * j.down + reach + 1;
        if (j.dimension == 2) {
          read(0, std::max(known, row * j.down), last);
          known = last;
        } else if (row == 0) {
          const int64_t end = slice * j.down + reach + 1;
          for (deep = std::max(deep, slice * j.down); deep < end; deep++)
            read(deep, 0, (rows - 1) * j.down + reach + 1);
        }
        const auto differentiated = [&](auto dimension, auto radius) {
          constexpr int D = decltype(dimension)::value, R = decltype(radius)::value;
          differentiate<D, R>(j, c, own[SPECTRUM], slice, row, here, columns, own[Z],
                              own[SCRATCH]);
        };
        if (j.dimension == 2)
          instance<0, 4>(j.size / 2, [&](auto radius) {
            differentiated(std::integral_constant<int, 2>{}, radius);
          });
        else
          instance<0, 2>(j.size / 2, [&](auto radius) {
            differentiated(std::integral_constant<int, 3>{}, radius);
          });
        // Between an image of the output's shape and the slots of the blocks.
        const auto pass = [&](bool back) {
          const int64_t plane = j.out_depth * j.out_height * j.out_width;
          const int64_t step = j.out_fields * c.pixels;
          const int64_t above = (front + slice) * j.out_height + top + row;  // lines
          const int64_t field_size = j.out_channels * plane, size = j.out_fields * field_size;
          const bool whole = columns == j.out_width;  // lines follow one another in the image too
          const int64_t lines = whole ? 1 : here, count = here * columns / lines;
          for (int64_t field = 0; field < j.out_fields; field++)
            for (int64_t r = 0; r < lines; r++) {
              Real* slots = own[PRODUCTS] + field * c.pixels + r * columns;
              const int64_t at = field * field_size + (above + r) * j.out_width + left;
              if (back)
                transform(j.synthesis, count, slots, step, c.pixels, j.y + image * size + at, plane,
                          count, own[SCRATCH]);
              else
                transform(j.spectrum, count, j.other + image * j.other_stride + at, plane,
                          size - field_size + plane - at, slots, step, c.pixels, own[SCRATCH]);
            }
        };
        if (j.w_gradient) pass(false);
        multiply(j, c, own[Z], matrices, here * columns, own[PRODUCTS], own[TURNED], own[SUMS]);
        if (j.y) pass(true);
      }
    }
  };
#ifdef _OPENMP
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
  for (int64_t part = 0; part < threads; part++) work(part);
#else
  std::vector<std::thread> pool;
  for (int64_t part = 1; part < threads; part++) pool.emplace_back(work, part);
  work(0);
  for (auto& thread : pool) thread.join();
#endif
  if (!j.w_gradient) return 0;
  each_entry<false>(j, [&](int64_t at, int64_t weight, Real sign) {
    Real sum = 0;
    for (int64_t t = 0; t < threads; t++) sum += all[t * starts[ALL] + starts[SUMS] + at];
    j.w_gradient[weight] += sign * sum;
  });
  return 0;
}
