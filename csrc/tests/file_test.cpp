#include "base/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/check.h"

namespace resilient {
namespace {

// A folder with one file of some text.
class TestFile {
 public:
  explicit TestFile(const std::string& text) {
    CHECK(::mkdtemp(folder_.data()) != nullptr);
    path = folder_ + "/file";
    std::FILE* const file = std::fopen(path.c_str(), "w");
    CHECK(file != nullptr);
    CHECK_EQ(std::fwrite(text.data(), 1, text.size(), file), text.size());
    CHECK_EQ(std::fclose(file), 0);
  }
  ~TestFile() {
    (void)::unlink(path.c_str());
    (void)::rmdir(folder_.c_str());
  }
  TestFile(const TestFile&) = delete;
  TestFile& operator=(const TestFile&) = delete;

  std::string path;

 private:
  std::string folder_ = "/tmp/torch_resilient_file_XXXXXX";
};

TEST(files_are_read_whole_or_refused) {
  const TestFile file("12345");
  std::string text;
  CHECK(readFile(file.path, FileUse::kPublic, 5, text).ok());
  CHECK_EQ(text, "12345");
  Status status = readFile(file.path, FileUse::kPublic, 4, text);
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_CONTAINS(status.message(), "longer than 4 bytes");
  status = readFile(file.path + "?", FileUse::kPublic, 5, text);
  CHECK_CONTAINS(status.message(), "cannot read it: ");
  status = readFile("/dev/zero", FileUse::kPublic, 5, text);
  CHECK_EQ(status.message(), "not a regular file");
}

TEST(files_with_secrets_are_for_their_user_and_group_only) {
  const TestFile file("secret");
  std::string text;
  CHECK_EQ(::chmod(file.path.c_str(), 0640), 0);
  CHECK(readFile(file.path, FileUse::kSecret, 10, text).ok());
  CHECK_EQ(::chmod(file.path.c_str(), 0644), 0);
  const Status status = readFile(file.path, FileUse::kSecret, 10, text);
  CHECK_CONTAINS(status.message(), "its mode 0644 lets other users in");
  CHECK(readFile(file.path, FileUse::kPublic, 10, text).ok());
}

TEST(files_that_do_not_end_are_not_waited_for) {
  const TestFile file("");
  CHECK_EQ(::unlink(file.path.c_str()), 0);
  CHECK_EQ(::mkfifo(file.path.c_str(), 0600), 0);
  std::string text;
  CHECK(!readFile(file.path, FileUse::kSecret, 10, text).ok());
}

TEST(files_of_the_kernel_are_text_without_the_last_line_end) {
  const TestFile file("4096\t131072 6291456\n");
  CHECK_EQ(kernelText(file.path), "4096\t131072 6291456");
  CHECK_EQ(kernelText(file.path + "?"), "");
  CHECK_EQ(kernelText("/proc/sys/kernel/random/boot_id").size(), size_t{36});
}

} // namespace
} // namespace resilient
