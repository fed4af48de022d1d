#include "tests/check.h"

int main(int argc, char** argv) {
  return resilient::test::runTests(argc, argv);
}
