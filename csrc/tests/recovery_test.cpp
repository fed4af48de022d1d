#include "datagram/recovery.h"

#include "tests/check.h"

namespace resilient::test {
namespace {

const RecoveryScheme& schemeOf(
    const RecoverySchemes& schemes,
    TrafficClass cls) {
  return schemes[static_cast<size_t>(cls)];
}

RecoverySchemes parsed(std::string_view text, const std::string& site) {
  const auto table = RecoveryTable::parse(text, ParityKind::kXor);
  CHECK(table.has_value());
  return table->of(site);
}

TEST(recovery_default_is_semantic) {
  for (const char* text : {"", "  ", "semantic", " semantic ", "*=semantic"}) {
    const RecoverySchemes schemes = parsed(text, "us");
    for (const RecoveryScheme& s : schemes) {
      CHECK_EQ(s.kind, RecoveryKind::kSemantic);
      CHECK_EQ(s.code, ParityKind::kXor);
    }
  }
}

TEST(recovery_reads_each_scheme) {
  for (const RecoveryScheme& s : parsed("selective_repeat", "")) {
    CHECK_EQ(s.kind, RecoveryKind::kSelectiveRepeat);
  }
  for (const RecoveryScheme& s : parsed("uniform_fec:50:7", "")) {
    CHECK_EQ(s.kind, RecoveryKind::kUniformFec);
    CHECK_EQ(s.data, 50);
    CHECK_EQ(s.parity, 7);
    CHECK_EQ(s.code, ParityKind::kXor);
  }
  // The bounds are included.
  CHECK_EQ(parsed("uniform_fec:1:1", "")[0].data, 1);
  CHECK_EQ(parsed("uniform_fec:100:100", "")[0].parity, 100);
  const auto table =
      RecoveryTable::parse("uniform_fec:10:1", ParityKind::kReedSolomon);
  CHECK_EQ(table->of("")[0].code, ParityKind::kReedSolomon);
}

TEST(recovery_most_exact_entry_counts) {
  // In whatever order they stand.
  for (const char* text :
       {"uniform_fec:10:1, /gradient=uniform_fec:10:2, us=uniform_fec:10:3, "
        "us/gradient=uniform_fec:10:4, */bulk=selective_repeat",
        "us/gradient=uniform_fec:10:4,us = uniform_fec:10:3,"
        "*/gradient=uniform_fec:10:2,/bulk=selective_repeat,"
        "*=uniform_fec:10:1"}) {
    const RecoverySchemes eu = parsed(text, "eu"), us = parsed(text, "us");
    CHECK_EQ(schemeOf(eu, TrafficClass::kActivation).parity, 1);
    CHECK_EQ(schemeOf(eu, TrafficClass::kActivationGradient).parity, 1);
    CHECK_EQ(schemeOf(eu, TrafficClass::kGradient).parity, 2);
    CHECK_EQ(
        schemeOf(eu, TrafficClass::kBulk).kind, RecoveryKind::kSelectiveRepeat);
    CHECK_EQ(schemeOf(us, TrafficClass::kActivation).parity, 3);
    CHECK_EQ(schemeOf(us, TrafficClass::kGradient).parity, 4);
    // A site is more exact than a class.
    CHECK_EQ(schemeOf(us, TrafficClass::kBulk).parity, 3);
    CHECK_EQ(schemeOf(us, TrafficClass::kBulk).kind, RecoveryKind::kUniformFec);
  }
  // What is not named keeps the default.
  const RecoverySchemes other = parsed("us=selective_repeat", "eu");
  CHECK_EQ(other[0].kind, RecoveryKind::kSemantic);
  for (size_t c = 0; c < kTrafficClassCount; ++c) {
    const auto cls = static_cast<TrafficClass>(c);
    const auto one = parsed(
        "/" + std::string(trafficClassName(cls)) + "=selective_repeat", "eu");
    for (size_t d = 0; d < kTrafficClassCount; ++d) {
      CHECK_EQ(one[d].kind == RecoveryKind::kSelectiveRepeat, c == d);
    }
  }
}

TEST(recovery_refuses_what_it_cannot_read) {
  for (const char* text :
       {"none",
        "Semantic",
        "semantic:1",
        "semantic:",
        "semantic,",
        "semantic, ",
        ",semantic",
        "selective_repeat:3",
        "uniform_fec",
        "uniform_fec:",
        "uniform_fec:10",
        "uniform_fec:10:",
        "uniform_fec:10:0",
        "uniform_fec:0:1",
        "uniform_fec:10:11",
        "uniform_fec:101:1",
        "uniform_fec:-5:1",
        "uniform_fec:10:1:2",
        "uniform_fec:10:x",
        "uniform_fec:1e1:1",
        "us=",
        "=semantic",
        "us",
        "us=semantic,us=semantic",
        "semantic,*=semantic",
        "/gradient=semantic,*/gradient=semantic",
        "us/gradient=semantic, us/gradient=selective_repeat",
        "us/weights=semantic",
        "us/=semantic",
        "/=semantic",
        "us/gradient/bulk=semantic",
        "u s=semantic",
        "us=semantic=semantic",
        ",",
        ",semantic",
        "semantic;us=semantic"}) {
    if (RecoveryTable::parse(text, ParityKind::kXor)) {
      throw Failure(std::string("taken: ") + text);
    }
  }
}

} // namespace
} // namespace resilient::test
