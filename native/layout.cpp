// What the caller must lay out and number as this library does: see daypack_layout.
#include <cstddef>
#include <string>
#include <type_traits>

#include "daypack.h"

namespace daypack {
namespace {

template <class T>
constexpr char kind() {
  if (std::is_pointer<T>::value) return 'u';
  return std::is_floating_point<T>::value ? 'f' : std::is_signed<T>::value ? 'i' : 'u';
}

void add(std::string& text, const char* name, const std::string& value) {
  text.append(" ").append(name).append("=").append(value);
}

template <class T>
void add_field(std::string& text, const char* name, size_t offset) {
  add(text, name, kind<T>() + std::to_string(sizeof(T)) + "@" + std::to_string(offset));
}

std::string layout() {
  std::string text = "DaypackParam";
#define ADD(type, name) add_field<type>(text, #name, offsetof(DaypackParam, name));
  DAYPACK_PARAM_FIELDS(ADD)
#undef ADD
  add(text, "sizeof", std::to_string(sizeof(DaypackParam)));
  text += "\nDaypackOptions";
#define ADD(type, name) add_field<type>(text, #name, offsetof(DaypackOptions, name));
  DAYPACK_OPTIONS_FIELDS(ADD)
#undef ADD
  add(text, "sizeof", std::to_string(sizeof(DaypackOptions)));
#define ADD(name, number) add(text, #name, std::to_string(number));
  text += "\nDaypackType";
  DAYPACK_TYPES(ADD)
  text += "\nDaypackSecondMoment";
  DAYPACK_SECOND_MOMENTS(ADD)
  text += "\nDaypackRule";
  DAYPACK_RULES(ADD)
  text += "\nDaypackLimit";
  DAYPACK_LIMITS(ADD)
#undef ADD
  return text;
}

}  // namespace
}  // namespace daypack

const char* daypack_layout(void) {
  static const std::string text = daypack::layout();
  return text.c_str();
}
