#pragma once

#include <string>
#include <vector>

namespace resilient {

// The algorithms that a group uses; the option collective_algorithm.
enum class AlgorithmChoice { kAuto, kFlat, kHierarchical };

// "auto", "flat" or "hierarchical"; anything else is kAuto.
AlgorithmChoice algorithmChoiceFrom(const std::string& name);
const char* nameOf(AlgorithmChoice choice);

// Ranks that are near each other: a single one, or nearer groups of them.
struct Place {
  // Invariant: `children` is empty or has two or more members, each with ranks
  // of its own. Their ranks need not be adjacent numbers.
  std::vector<int> ranks; // of all children, ascending
  std::vector<Place> children; // none for a single rank, else two or more

  bool single() const {
    return children.empty();
  }
  bool contains(int rank) const;
  // The index of the child that holds `rank`, which must be in here.
  size_t childOf(int rank) const;
  // Levels of groups: 0 for a single rank.
  size_t height() const;
};

// The places of the ranks of a group: hosts within sites. Equal on all ranks,
// so all choose the same algorithms. Immutable.
class Topology {
 public:
  // All ranks at one place, as if nothing were known.
  explicit Topology(int ranks);
  // By rank: the name of its site (or empty: nothing was declared) and any
  // number that only ranks of the same host share. Two sites never share a
  // host here: ranks of one machine that declare different sites are apart.
  // Both vectors have one entry per rank. siteRoundTripS: as below.
  Topology(
      std::vector<std::string> sites,
      std::vector<int> hosts,
      AlgorithmChoice choice,
      double siteRoundTripS = 0);

  int size() const {
    return static_cast<int>(sites_.size());
  }
  const std::vector<std::string>& sites() const {
    return sites_;
  }
  const std::vector<int>& hosts() const {
    return hosts_;
  }
  AlgorithmChoice choice() const {
    return choice_;
  }
  // All ranks: children are sites if there are several, else hosts, else ranks.
  // A group of one counts as its only member. Children stand in the order of
  // their lowest ranks.
  // The reference is valid while this Topology exists; algorithms keep it for
  // the time of an operation.
  const Place& root() const {
    return root_;
  }
  // The ranks are on several hosts.
  bool hasHosts() const {
    return hasHosts_;
  }
  // The children of the root are sites, not hosts or ranks.
  bool hasSites() const {
    return hasSites_;
  }
  // From one site to another, in seconds; 0: unknown.
  double siteRoundTripS() const {
    return siteRoundTripS_;
  }
  // There are groups that have something to do among themselves.
  // False if the root's children are ranks: a hierarchical algorithm would then
  // be a flat one.
  bool hasLevels() const {
    return height_ > 1;
  }
  size_t height() const {
    return height_;
  }

 private:
  std::vector<std::string> sites_;
  std::vector<int> hosts_;
  AlgorithmChoice choice_ = AlgorithmChoice::kAuto;
  double siteRoundTripS_ = 0;
  bool hasHosts_ = false;
  bool hasSites_ = false;
  Place root_;
  size_t height_ = 0;
};

} // namespace resilient
