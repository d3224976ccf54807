// 8-bit floats: conversion and scales.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "octet/base/float8_scale.h"
#include "octet/base/tensor.h"
#include "support/seed.h"

namespace octet::test {
namespace {

template <typename T>
class Float8FormatTest : public testing::Test {};
using Formats = testing::Types<E4M3, E5M2>;
TYPED_TEST_SUITE(Float8FormatTest, Formats);

template <typename T>
float value_of(int code) {
  T element;
  element.bits = static_cast<std::uint8_t>(code);
  return static_cast<float>(element);
}
template <typename T>
float largest_value() {
  return DTypeOf<T>::value == DType::kE4M3 ? 448.0f : 57344.0f;
}

TYPED_TEST(Float8FormatTest, EveryFiniteValueSurvivesTheWayThroughFloat) {
  int finite = 0;
  for (int code = 0; code < 256; ++code) {
    const float value = value_of<TypeParam>(code);
    if (std::isnan(value)) continue;
    ++finite;
    EXPECT_EQ(static_cast<int>(TypeParam(value).bits), code) << value;
    EXPECT_LE(std::fabs(value), largest_value<TypeParam>());
  }
  // E4M3 has two NaNs; of E5M2 the infinities are not used either.
  EXPECT_EQ(finite, (DTypeOf<TypeParam>::value == DType::kE4M3 ? 254 : 248));
  EXPECT_EQ(value_of<TypeParam>(1), (DTypeOf<TypeParam>::value == DType::kE4M3 ? 0x1p-9f : 0x1p-16f));
}

TYPED_TEST(Float8FormatTest, RoundsToTheNearestAndTiesToEven) {
  for (int code = 0; value_of<TypeParam>(code) < largest_value<TypeParam>(); ++code) {
    const float low = value_of<TypeParam>(code), high = value_of<TypeParam>(code + 1);
    for (int part = 0; part <= 16; ++part) {
      const float value = low + static_cast<float>(part) / 16.0f * (high - low);
      const bool up = part > 8 || (part == 8 && code % 2 == 1);
      EXPECT_EQ(static_cast<float>(TypeParam(value)), up ? high : low) << value;
      EXPECT_EQ(static_cast<float>(TypeParam(-value)), up ? -high : -low) << -value;
    }
  }
}

TYPED_TEST(Float8FormatTest, WhatIsTooLargeBecomesTheLargestValueAndNaNStaysNaN) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value :
       {1.1f * largest_value<TypeParam>(), 1e30f, std::numeric_limits<float>::max(), kInfinity}) {
    EXPECT_EQ(static_cast<float>(TypeParam(value)), largest_value<TypeParam>());
    EXPECT_EQ(static_cast<float>(TypeParam(-value)), -largest_value<TypeParam>());
  }
  EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_EQ(static_cast<float>(TypeParam(std::numeric_limits<float>::denorm_min())), 0.0f);
}

TYPED_TEST(Float8FormatTest, ScaleIsTheSmallestPowerOfTwoWithWhichTheLargestMagnitudeFits) {
  constexpr DType kType = DTypeOf<TypeParam>::value;
  const float limit = largest_value<TypeParam>();
  std::mt19937_64 random(test_seed());
  std::uniform_real_distribution<float> exponent(-100.0f, 120.0f);
  for (int round = 0; round < 2000; ++round) {
    const float largest = std::exp2(exponent(random));
    const float scale = float8_scale(largest, kType);
    int power = 0;
    EXPECT_EQ(std::frexp(scale, &power), 0.5f);
    EXPECT_LE(largest, scale * limit);
    EXPECT_GT(largest, scale / 2.0f * limit);
  }
  EXPECT_EQ(float8_scale(limit, kType), 1.0f);
  EXPECT_EQ(float8_scale(0.0f, kType), 1.0f);
  EXPECT_EQ(float8_scale(std::numeric_limits<float>::denorm_min(), kType), 0x1p-126f);
  EXPECT_FALSE(std::isfinite(float8_scale(std::numeric_limits<float>::infinity(), kType)));
}

}  // namespace
}  // namespace octet::test
