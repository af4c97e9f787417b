// Runs calls of the kernel that another process describes: a processor of its own, or an emulated one.
//
// A request: the pass's name, the number of threads, blocks of memory (the call first, then what it points to) and the
// places in them that hold the address of another block. The answer: the pass's code, and all blocks as it left them.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

struct Call;
extern "C" {
extern int64_t dape_share;
int dape_forward(const char *, const Call *, int);
int dape_backward(const char *, const Call *, int);
int dape_decode(const char *, const Call *, int);
int dape_program_forward(const char *, const Call *, int);
int dape_program_backward(const char *, const Call *, int);
int dape_program_decode(const char *, const Call *, int);
}

template <class T>
bool get(T &value) {
  return fread(&value, sizeof value, 1, stdin) == 1;
}

int main() {
  dape_share = 1;
  const struct {
    const char *name;
    int (*run)(const char *, const Call *, int);
  } passes[] = {
      {"forward", dape_forward},
      {"backward", dape_backward},
      {"decode", dape_decode},
      {"program_forward", dape_program_forward},
      {"program_backward", dape_program_backward},
      {"program_decode", dape_program_decode},
  };
  for (int32_t letters, threads, count; get(letters);) {
    std::string name(static_cast<size_t>(letters), ' ');
    if (fread(&name[0], 1, name.size(), stdin) != name.size() || !get(threads) || !get(count)) return 1;
    std::vector<std::vector<char>> blocks(static_cast<size_t>(count));
    for (std::vector<char> &block : blocks) {
      int64_t size;
      if (!get(size)) return 1;
      // Nothing is said of how memory is aligned but that numbers are.
      block.resize(static_cast<size_t>(size));
      if (fread(block.data(), 1, block.size(), stdin) != block.size()) return 1;
    }
    int32_t places;
    if (!get(places)) return 1;
    for (int32_t n = 0; n < places; ++n) {
      int32_t block, target;
      int64_t offset;
      if (!get(block) || !get(offset) || !get(target)) return 1;
      const char *address = blocks[static_cast<size_t>(target)].data();
      memcpy(blocks[static_cast<size_t>(block)].data() + offset, &address, sizeof address);
    }
    int32_t code = -1;
    for (const auto &pass : passes)
      if (name == pass.name) code = pass.run("", reinterpret_cast<const Call *>(blocks[0].data()), threads);
    fwrite(&code, sizeof code, 1, stdout);
    for (const std::vector<char> &block : blocks) fwrite(block.data(), 1, block.size(), stdout);
    fflush(stdout);
  }
}
