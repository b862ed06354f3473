// A group's options and a parameter's step count as the numbers that the loops want: the `hyper` functions of
// src/daypack/rules/.
#include <cmath>

#include "passes.h"

namespace daypack {
namespace {

float fp32(double x) { return static_cast<float>(x); }

// m = beta1 * m + (1 - beta1) * gradient, and v likewise.
void average(Step& s, double beta1, double beta2) {
  s.beta1 = fp32(beta1);
  s.fresh1 = fp32(1 - beta1);
  s.beta2 = fp32(beta2);
  s.fresh2 = fp32(1 - beta2);
}

void adam(Step& s, const DaypackOptions& o, double taken) {
  average(s, o.beta1, o.beta2);
  s.rate = fp32(o.lr / (1 - std::pow(o.beta1, taken)));
  s.correction2 = fp32(1 - std::pow(o.beta2, taken));
  if (s.rule == DAYPACK_ADAMW) s.decay = fp32(1 - o.lr * o.weight_decay);
}

void sgd(Step& s, const DaypackOptions& o, double taken) {
  s.beta1 = taken > 1 ? fp32(o.beta1) : 0.0f;  // the first gradient is the moment
  s.fresh1 = taken > 1 ? fp32(1 - o.dampening) : 1.0f;
  s.ahead = o.nesterov != 0 ? fp32(o.beta1) : 1.0f;
  s.now = o.nesterov != 0 ? 1.0f : 0.0f;
}

void lion(Step& s, const DaypackOptions& o) {
  average(s, o.beta2, 0);
  s.ahead = fp32(o.beta1);
  s.now = fp32(1 - o.beta1);
  s.decay = fp32(1 - o.lr * o.weight_decay);
}

void lamb(Step& s, const DaypackOptions& o, double taken) {
  average(s, o.beta1, o.beta2);
  s.unbias = fp32(1 / (1 - std::pow(o.beta1, taken)));
  s.correction2 = fp32(1 - std::pow(o.beta2, taken));
  s.inner = fp32(o.weight_decay);
}

void adafactor(Step& s, const DaypackOptions& o, double taken) {
  average(s, o.beta1, 1 - std::pow(taken, o.beta2_decay));
  s.rate = fp32(o.relative_step != 0 ? std::fmin(o.lr, 1 / std::sqrt(taken)) : o.lr);
  s.decay = fp32(1 - o.lr * o.weight_decay);
}

}  // namespace

double coupled_decay(const DaypackOptions& o) {
  return o.rule == DAYPACK_ADAM || o.rule == DAYPACK_SGD ? o.weight_decay : 0;
}

Step make_step(const DaypackOptions& o, double taken, const Codec* codec) {
  Step s{};
  s.rule = static_cast<int>(o.rule);
  s.sign = fp32(o.sign);
  s.coupled = fp32(coupled_decay(o));
  s.rate = fp32(o.lr);
  s.decay = s.correction2 = s.clip = 1;
  s.eps = fp32(o.eps);
  switch (s.rule) {
    case DAYPACK_SGD: sgd(s, o, taken); break;
    case DAYPACK_LION: lion(s, o); break;
    case DAYPACK_LAMB: lamb(s, o, taken); break;
    case DAYPACK_ADAFACTOR: adafactor(s, o, taken); break;
    default: adam(s, o, taken);
  }
  s.turn = static_cast<uint32_t>(static_cast<uint64_t>(taken) * DITHER_STEP);
  s.codec = codec;
  return s;
}

void use_norms(Step& s, const DaypackParam& d, const DaypackOptions& o) {
  if (!measures(o)) return;
  const double param = std::sqrt(d.squares[0]), measured = std::sqrt(d.squares[1]);
  if (s.rule == DAYPACK_LAMB) {
    if (param > 0 && measured > 0 && o.trust_ratio != 0) s.rate = fp32(o.lr * (param / measured));
    return;
  }
  const double root = std::sqrt(static_cast<double>(d.numel));
  s.clip = fp32(1 / std::fmax(1.0, measured / (root * o.clip)));
  if (o.scale_parameter != 0) s.rate *= fp32(std::fmax(o.smallest_scale, param / root));
}

}  // namespace daypack
