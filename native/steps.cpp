// The functions that step parameters, as the library exports them.
#include <algorithm>
#include <cmath>

#include "passes.h"

namespace daypack {
namespace {

// Parameters up to this size take both passes at once, in one task and without scratch memory.
constexpr int64_t SMALL = 1 << 14;
// Bytes of gradients of larger ones that both passes read from the cache: a part of the third level, which is shared.
constexpr int64_t WAVE_BYTES = 8 << 20;

bool is_small(const DaypackParam& d) {
  return d.rank == 0 && elements(d) <= SMALL && Tiling::of_observe(d).whole_matrices() && Tiling::of_apply(d).whole_matrices();
}

// Both passes over one small parameter, which is left as it is if its sum of g^2, the result, is not finite.
float step_small(const DaypackParam& d, const DaypackOptions& options, StepMaker& steps, const Codec* codec) {
  double total = 0;
  Tile tile{&d, 0, 0, d.rows, 0, d.cols};
  for (; tile.matrix < d.matrices; ++tile.matrix)
    total += observe_tile(tile, options, d.sums + tile.matrix * d.rows,
                          has_cols(d) ? col_sums(d) + tile.matrix * d.cols : nullptr);
  sum_groups(d);
  if (!std::isfinite(static_cast<float>(total))) return static_cast<float>(total);
  Step step = steps(d, codec);
  *d.step += 1;
  if (measures(options)) {
    d.squares[0] = d.squares[1] = 0;
    for (tile.matrix = 0; tile.matrix < d.matrices; ++tile.matrix) {
      combine(tile, step);
      kernels().measure(tile, step, d.squares);
    }
    use_norms(step, d, options);
  }
  for (tile.matrix = 0; tile.matrix < d.matrices; ++tile.matrix) {
    if (measures(options)) use_mean(tile, step);
    else combine(tile, step);
    kernels().apply(tile, step);
  }
  return static_cast<float>(total);
}

void step_all_small(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
                    const std::vector<uint8_t>& small, int threads, float* totals) {
  std::vector<int64_t> starts{0};  // of the tasks
  starts.reserve(static_cast<size_t>(count) + 2);
  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) {
    size += small[static_cast<size_t>(i)] ? elements(params[i]) : 0;
    if (size < 2 * SMALL) continue;
    starts.push_back(i + 1);
    size = 0;
  }
  if (size > 0) starts.push_back(count);
  parallel_for(static_cast<int64_t>(starts.size()) - 1, threads, [&](int64_t task) {
    StepMaker steps(options);
    for (int64_t i = starts[static_cast<size_t>(task)]; i < starts[static_cast<size_t>(task) + 1]; ++i)
      if (small[static_cast<size_t>(i)]) totals[i] = step_small(params[i], options[params[i].options], steps, codecs[i]);
  });
}

int64_t step(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads, float* totals) {
  Codecs codecs;
  const int64_t bad = codecs.prepare(params, count, nullptr, threads);
  if (bad >= 0) return bad;
  std::vector<uint8_t> small(static_cast<size_t>(count)), active(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) small[static_cast<size_t>(i)] = is_small(params[i]);
  if (!step_projected(params, count, options, codecs.each(), nullptr, threads, totals)) return DAYPACK_NO_MEMORY;
  step_all_small(params, count, options, codecs.each(), small, threads, totals);
  for (int64_t i = 0; i < count; ++i) small[static_cast<size_t>(i)] |= params[i].rank > 0;  // done like these
  const auto skip = [&](int64_t i) {
    while (i < count && small[static_cast<size_t>(i)]) ++i;
    return i;
  };
  for (int64_t first = skip(0), end; first < count; first = skip(end)) {
    int64_t bytes = 0;
    bool measured = false;
    for (end = first; end < count && !small[static_cast<size_t>(end)] && (end == first || bytes < WAVE_BYTES); ++end) {
      bytes += elements(params[end]) * (params[end].grad_type == DAYPACK_FP32 ? 4 : 2);
      measured = measured || measures(options[params[end].options]);
    }
    observe(params + first, end - first, options, threads, totals + first);
    for (int64_t i = first; i < end; ++i) active[static_cast<size_t>(i)] = std::isfinite(totals[i]);
    if (measured)
      measure(params + first, end - first, options, codecs.each() + first, active.data() + first, threads);
    apply(params + first, end - first, options, codecs.each() + first, active.data() + first, threads);
  }
  return -1;
}

}  // namespace
}  // namespace daypack

int daypack_interface(void) { return DAYPACK_INTERFACE; }

const char* daypack_cpu(void) { return daypack::kernels().name; }

int daypack_use_cpu(const char* name) { return daypack::select(name) ? 0 : -1; }

int daypack_numbers_are(const int64_t* const* places, const int64_t* numbers, int64_t count) {
  int64_t i = 0;
  while (i < count && *places[i] == numbers[i]) ++i;
  return i == count;
}

int64_t daypack_check(const DaypackParam* params, int64_t count, const uint8_t* active, int threads) {
  return daypack::Codecs().prepare(params, count, active, threads);
}

void daypack_observe(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads,
                     float* totals) {
  if (std::none_of(params, params + count, [](const DaypackParam& d) { return d.rank > 0; }))
    return daypack::observe(params, count, options, threads, totals);
  std::vector<DaypackParam> whole(params, params + count);
  std::transform(params, params + count, whole.begin(), daypack::unprojected);
  daypack::observe(whole.data(), count, options, threads, totals);
}

int64_t daypack_measure(const DaypackParam* params, int64_t count, const DaypackOptions* options, const uint8_t* active,
                        int threads) {
  daypack::Codecs codecs;
  const int64_t bad = codecs.prepare(params, count, active, threads);
  if (bad < 0) daypack::measure(params, count, options, codecs.each(), active, threads);
  return bad;
}

int64_t daypack_apply(const DaypackParam* params, int64_t count, const DaypackOptions* options, const uint8_t* active,
                      int threads) {
  daypack::Codecs codecs;
  const int64_t bad = codecs.prepare(params, count, active, threads);
  if (bad >= 0) return bad;
  if (!daypack::step_projected(params, count, options, codecs.each(), active, threads, nullptr)) return DAYPACK_NO_MEMORY;
  daypack::apply(params, count, options, codecs.each(), active, threads);
  return bad;
}

int64_t daypack_step(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads, float* totals) {
  return daypack::step(params, count, options, threads, totals);
}
