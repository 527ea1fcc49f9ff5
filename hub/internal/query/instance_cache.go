package query

import (
	"slices"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxInstanceCache bounds the instances in the cache; those read longest ago go first.
const maxInstanceCache = 1024

// InstanceCache has app instances as they were last read, so that a read of one that has not changed asks the database
// for little more than its version. It never answers by itself: another process may have changed the instance. Make one
// with NewInstanceCache; a nil one caches nothing.
type InstanceCache struct {
	of     *lru.Cache[string, cachedInstance]
	states instanceStates
}

// cachedInstance is an instance with what changes with its version only. It is shared: nothing of it is ever written.
type cachedInstance struct {
	instance instance.Instance
	services map[string][]*protocol.Service
	// hostnames are those of Instance. A node that is renamed makes its instances newer.
	hostnames map[string]string
}

// NewInstanceCache makes an empty cache of instances of d.
func NewInstanceCache(d *db.DB) *InstanceCache {
	of, _ := lru.New[string, cachedInstance](maxInstanceCache) // it refuses sizes below 1 only
	return &InstanceCache{of: of, states: newInstanceStates(d)}
}

func (r *InstanceCache) get(id string) (cachedInstance, bool) {
	if r == nil {
		return cachedInstance{}, false
	}
	return r.of.Get(id)
}

// keep caches an instance, but for one whose members an external worker reports: a heartbeat without news is no new
// version.
func (r *InstanceCache) keep(i cachedInstance) {
	external := func(m instance.Member) bool { return m.External }
	if r != nil && !slices.ContainsFunc(i.instance.Members, external) {
		r.of.Add(i.instance.ID, i)
	}
}

func (i cachedInstance) has(v instance.Version) bool {
	return i.instance.ResourceVersion == v.No && i.instance.UpdatedAt.Equal(v.UpdatedAt)
}
