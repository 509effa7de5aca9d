// The drivers share this: a case is a line of `name=value` words on standard input, a result a line
// on standard output.
#pragma once

#include <cstdio>
#include <iostream>
#include <set>
#include <sstream>

#include "emulator.h"

namespace emulator {

class Case {
 public:
  explicit Case(const std::string& line) : line_(line) {
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const size_t equals = word.find('=');
      if (equals == word.npos) fail("not name=value: " + word);
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }

  std::string text(const std::string& name, const std::string& otherwise) const {
    read_.insert(name);
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  int number(const std::string& name, int otherwise = 0) const {
    return std::stoi(text(name, std::to_string(otherwise)));
  }
  std::vector<int> numbers(const std::string& name, const std::string& otherwise = "") const {
    std::vector<int> list;
    std::istringstream parts(text(name, otherwise));
    for (std::string part; std::getline(parts, part, ',');) list.push_back(std::stoi(part));
    return list;
  }
  // The value that one of some words stands for.
  template <typename Choice>
  Choice choice(const std::string& name, const std::map<std::string, Choice>& choices,
                const std::string& otherwise) const {
    const auto found = choices.find(text(name, otherwise));
    if (found == choices.end()) fail("unknown " + name + " in " + line_);
    return found->second;
  }
  const std::string& line() const { return line_; }

  // Returns the machine's settings, and seeds its dice.
  Settings machine_settings() const {
    dice.seed(static_cast<unsigned>(number("seed", 1)));
    Settings found;
    found.timing = choice<Timing>(
        "timing", {{"late", Timing::kLate}, {"early", Timing::kEarly}, {"random", Timing::kRandom}},
        "late");
    found.order = choice<Order>("order",
                                {{"forward", Order::kForward},
                                 {"backward", Order::kBackward},
                                 {"together", Order::kTogether}},
                                "forward");
    found.multiprocessors = number("multiprocessors", 132);
    return found;
  }

  // A word that nobody reads would test nothing.
  void check_words() const {
    for (const auto& [name, value] : values_) {
      if (!read_.contains(name)) fail("nothing reads " + name + " in " + line_);
    }
  }

 private:
  std::string line_;
  std::map<std::string, std::string> values_;
  mutable std::set<std::string> read_;
};

// Runs `check` on every case; it returns whether the kernel's results are right.
template <typename Check>
int run_cases(const Check& check) {
  int failed = 0;
  for (std::string line; std::getline(std::cin, line);) {
    const Case given(line);
    settings = given.machine_settings();
    failed += check(given) ? 0 : 1;
    given.check_words();
    fflush(stdout);
  }
  return failed > 0;
}

// Memory of a kernel's argument, whose ends are guarded. It stays until the process ends.
template <typename Element>
Element* device_array(size_t count) {
  return static_cast<Element*>(guarded_memory(std::max<size_t>(count, 1) * sizeof(Element)));
}

template <typename Element, typename Draw>
Element* drawn_array(size_t count, const Draw& draw) {
  Element* made = device_array<Element>(count);
  for (size_t i = 0; i < count; ++i) made[i] = Element(draw());
  return made;
}

template <typename Element>
Element* array_of(const std::vector<Element>& values) {
  Element* made = device_array<Element>(values.size());
  std::copy(values.begin(), values.end(), made);
  return made;
}

template <typename Element>
bool is_unwritten(const Element& element) {
  const char* bytes = reinterpret_cast<const char*>(&element);
  return std::all_of(bytes, bytes + sizeof element, [](char byte) { return byte == '\xff'; });
}

// Counts what differs from the reference.
struct Tally {
  long compared = 0, wrong = 0, unwritten = 0, stray = 0;
  double worst = 0;  // error, in tolerances

  template <typename Element>
  void compare(const Element& got, double want, double tolerance) {
    ++compared;
    if (is_unwritten(got)) {
      ++unwritten;
      return;
    }
    const double error = std::fabs(static_cast<double>(static_cast<float>(got)) - want);
    if (!(error <= tolerance)) ++wrong;
    if (tolerance > 0) worst = std::max(worst, error / tolerance);
  }
  template <typename Element>
  void expect_unwritten(const Element& got) {
    ++compared;
    stray += !is_unwritten(got);
  }

  bool report(const Case& given) const {
    const bool good = wrong + unwritten + stray == 0 && compared > 0;
    printf("%s %s: %ld wrong, %ld unwritten, %ld stray of %ld; worst %.2g of the tolerance\n",
           good ? "PASS" : "FAIL", given.line().c_str(), wrong, unwritten, stray, compared, worst);
    return good;
  }
};

}  // namespace emulator
