package query

import (
	"maps"
	"slices"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxRecentInstances bounds the instances that are remembered; those read longest ago go first.
const maxRecentInstances = 1024

// RecentInstances remembers app instances as they were last read, so that a read of one that has not changed asks the
// database for little more than its version. It never answers by itself: another process may have changed the instance.
// Make one with NewRecentInstances; a nil one remembers nothing.
type RecentInstances struct {
	of *lru.Cache[string, recentInstance]
}

// recentInstance is an instance with what changes with its version only. It is shared: nothing of it is ever written.
type recentInstance struct {
	instance instance.Instance
	services map[string][]*protocol.Service
}

// NewRecentInstances makes an empty memory.
func NewRecentInstances() *RecentInstances {
	of, _ := lru.New[string, recentInstance](maxRecentInstances) // it refuses sizes below 1 only
	return &RecentInstances{of: of}
}

func (r *RecentInstances) get(id string) (recentInstance, bool) {
	if r == nil {
		return recentInstance{}, false
	}
	return r.of.Get(id)
}

// keep remembers an instance, but for one whose members an external worker reports: a heartbeat without news is no new
// version.
func (r *RecentInstances) keep(i recentInstance) {
	external := func(m instance.Member) bool { return m.External }
	if r != nil && !slices.ContainsFunc(i.instance.Members, external) {
		r.of.Add(i.instance.ID, i)
	}
}

func (i recentInstance) has(v instance.Version) bool {
	return i.instance.ResourceVersion == v.No && i.instance.UpdatedAt.Equal(v.UpdatedAt)
}

// nodes are those of the members with endpoints, each once.
func (i recentInstance) nodes() []string {
	nodes := map[string]bool{}
	for _, m := range i.instance.Members {
		if len(m.Endpoints) > 0 {
			nodes[m.NodeID] = true
		}
	}
	return slices.Sorted(maps.Keys(nodes))
}
