// What the x-ray knows of the order between blocks: the releases of a launch, each with what was done before it.
#pragma once

#include <cstdint>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <vector>

namespace simt {

// When a thread did something, inside its block: barriers passed, warp, warp barriers passed by the lane.
inline uint64_t make_moment(uint64_t epoch, int warp, uint32_t time) {
  return epoch << 36 | uint64_t(warp) << 31 | time;
}
inline uint64_t epoch_of(uint64_t moment) { return moment >> 36; }
inline int warp_of(uint64_t moment) { return int(moment >> 31 & 31); }
inline uint32_t time_of(uint64_t moment) { return uint32_t(moment & 0x7fffffff); }

// What a thread had done, or knew to be done, when it released: of its block all that is of an earlier epoch, and of its
// warp what each lane had done by its time; of other blocks what the releases had seen that it had acquired.
struct Release {
  uint64_t block = 0;  // linear index + 1; 0: no release, several are put together
  uint64_t epoch = 0;
  int warp = 0;
  uint32_t time[32] = {};
  std::vector<uint32_t> before;
};

// The releases of a launch are numbered as they happen, from 1 on; those before one of them have smaller numbers.
class History {
 public:
  std::mutex mutex;  // of all of it, also while a word and what it hands on change together

  void clear() {
    releases_.assign(1, {});
    first_.clear();
    word_.clear();
  }

  uint32_t add(Release release) {
    const auto number = uint32_t(releases_.size());
    if (release.block) first_.try_emplace(release.block, number);
    releases_.push_back(std::move(release));
    return number;
  }
  uint32_t put_together(std::vector<uint32_t> some) {
    if (some.size() == 1) return some[0];
    Release all;
    all.before = std::move(some);
    return add(std::move(all));
  }

  // The release that a word of memory hands to whoever acquires it, 0 for none.
  uint32_t handed_on(const void* word) const {
    const auto found = word_.find(word);
    return found == word_.end() ? 0 : found->second;
  }
  void hand_on(const void* word, uint32_t release) { word_[word] = release; }

  // The last releases of a block among `some` and all before them, which cover what its earlier ones do.
  std::vector<uint32_t> last_of(uint64_t block, const std::vector<uint32_t>& some) const {
    std::vector<uint32_t> found;
    const auto first = first_.find(block);
    if (first == first_.end()) return found;
    std::priority_queue<uint32_t> open(some.begin(), some.end());
    for (uint32_t previous = 0; !open.empty() && open.top() >= first->second;) {
      const uint32_t number = open.top();
      open.pop();
      if (number == previous) continue;
      previous = number;
      const Release& release = releases_[number];
      if (release.block == block) {
        if (!found.empty() && release.epoch < releases_[found[0]].epoch) break;
        found.push_back(number);
      }
      for (uint32_t other : release.before) open.push(other);
    }
    return found;
  }

  // Had `lanes` of the block of these releases (0: of several warps) done by one of them what they did at a moment?
  bool cover(const std::vector<uint32_t>& releases, uint64_t moment, uint32_t lanes) const {
    uint32_t left = lanes;
    for (uint32_t number : releases) {
      const Release& release = releases_[number];
      if (epoch_of(moment) < release.epoch) return true;
      if (epoch_of(moment) > release.epoch || warp_of(moment) != release.warp) continue;
      for (int lane = 0; lane < 32; ++lane) {
        if (release.time[lane] >= time_of(moment)) left &= ~(1u << lane);
      }
    }
    return lanes && !left;
  }

 private:
  std::vector<Release> releases_{1};
  std::unordered_map<uint64_t, uint32_t> first_;  // of a block
  std::unordered_map<const void*, uint32_t> word_;
};

}  // namespace simt
