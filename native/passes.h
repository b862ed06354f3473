// Both passes over a list of parameters. What is computed depends on the shapes alone, never on the number of threads.
#pragma once
#include <memory>
#include <vector>

#include "tiling.h"

namespace daypack {

// Sum of g^2 over a tile. Its row and column sums go to `rows` and `cols` where the second moment is factored; block sums
// go to their place in the parameter's `sums`.
double observe_tile(const Tile& tile, const DaypackOptions& options, float* rows, float* cols);

// Sums of groups of lines from the sums of the lines.
void sum_groups(const DaypackParam& param);

// See daypack_observe.
void observe(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads, float* totals);

// Tables of the parameters' codebooks.
class Codecs {
 public:
  // Of the parameters that `active` marks (null: all). Returns -1, or the index of one whose codebook is not usable.
  int64_t prepare(const DaypackParam* params, int64_t count, const uint8_t* active, int threads);
  // One pointer per parameter; null where the first moment is not coded.
  const Codec* const* each() const { return each_.data(); }

 private:
  std::vector<const Codec*> each_;
  std::vector<std::unique_ptr<Codec>> all_;
};

// Weight decay that is part of the gradient.
double coupled_decay(const DaypackOptions& options);

// Whether the rule scales a whole tensor by what it measured.
inline bool measures(const DaypackOptions& options) {
  return options.rule == DAYPACK_LAMB || options.rule == DAYPACK_ADAFACTOR;
}

// Scales `step` by the norms of a parameter.
void use_norms(Step& step, const DaypackParam& param, const DaypackOptions& options);

// One parameter's step, the `taken`-th of it (from 1).
Step make_step(const DaypackOptions& options, double taken, const Codec* codec);

// Makes one step after the other; most parameters of a list have options and count in common.
class StepMaker {
 public:
  explicit StepMaker(const DaypackOptions* options) : options_(options) {}

  Step operator()(const DaypackParam& d, const Codec* codec) {
    const double taken = static_cast<double>(*d.step) + 1;
    if (taken != taken_ || d.options != index_) last_ = make_step(options_[d.options], taken, nullptr);
    taken_ = taken;
    index_ = d.options;
    last_.codec = codec;
    return last_;
  }

 private:
  const DaypackOptions* options_;
  Step last_{};
  double taken_ = 0;
  int64_t index_ = -1;
};

// Combines the statistics of a tile that is a whole matrix (or, where none belongs to columns, any rows of one).
void combine(const Tile& tile, Step& step);
// Sets the mean of column means, where a factored second moment is complete.
void use_mean(const Tile& tile, Step& step);

// See daypack_measure; the codebooks are prepared.
void measure(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
             const uint8_t* active, int threads);

// See daypack_apply; the codebooks are prepared.
void apply(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
           const uint8_t* active, int threads);

// A projected parameter as it is, for its sum of g^2; any other one unchanged.
DaypackParam unprojected(const DaypackParam& param);

// Both passes over the projected parameters that `active` marks (null: all); the codebooks are prepared. Those whose sum of
// g^2 is not finite are left as they are. `totals`: where these sums go; null if they are known. False, and nothing has
// changed, if there is no memory for it.
bool step_projected(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
                    const uint8_t* active, int threads, float* totals);

}  // namespace daypack
