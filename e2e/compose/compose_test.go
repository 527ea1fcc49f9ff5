package compose_test

import (
	"archive/tar"
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sync/semaphore"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/nvmltest"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/compose"
)

const (
	slug    = "corpus"
	program = "github.com/gpuaas/gpuaas/e2e/compose/service"
	// serviceMillis and serviceMiB are what each service gets instead of what its file says: all run on a small node.
	serviceMillis, serviceMiB = 100, 64
	// nodeMillis bounds what runs at once.
	nodeMillis = 1000
)

// corpus is a node on which the files run, with GPUs of both vendors, and the images that stand in for theirs.
type corpus struct {
	*harness.Testbed
	// images are a server, app, and what runs once, once; refs are their names: <repository>@<digest>.
	images map[string]v1.Image
	refs   map[string]string
	// room is the share of the node that is left; gpus is held while a file uses GPUs.
	room *semaphore.Weighted
	gpus sync.Mutex
	// entitle is done once the app is there.
	entitle sync.Once
}

// Every file that the converter takes runs on a node as it is converted, with its images replaced and its sizes made
// smaller, and has the effect that its first line names.
func TestTheFilesOfTheCorpusRun(t *testing.T) {
	c := newCorpus(t)
	files, err := filepath.Glob(filepath.Join(harness.Source(t), "pkg/compose/testdata/corpus/*.yaml"))
	require.NoError(t, err)
	checks, began := checks(), time.Now()
	toRun := map[string]string{}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".yaml")
		if !strings.HasSuffix(name, ".manifest") && !strings.Contains(name, "-no-") {
			toRun[name] = path
		}
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(checks)), slices.Collect(maps.Keys(toRun)), "each file has a check")
	var apps sync.WaitGroup
	for _, name := range slices.Sorted(maps.Keys(toRun)) {
		apps.Go(func() {
			t.Run(name, func(t *testing.T) {
				file, err := os.ReadFile(toRun[name])
				require.NoError(t, err)
				c.run(t, name, string(file), checks[name])
			})
		})
	}
	apps.Wait()
	t.Logf("all files ran within %s", time.Since(began).Round(time.Second))
}

func newCorpus(t *testing.T) *corpus {
	t.Helper()
	c := &corpus{Testbed: harness.New(t), room: semaphore.NewWeighted(nodeMillis)}
	c.StartContainerd()
	c.StartHub(c.HubConfig())
	c.NewTenant("acme")
	conf := c.AgentConfig("node")
	machine := c.Machine(&conf, "radeon.txtar")
	if harness.HasNVML(t) {
		library, driver := nvmltest.New(t), conf.Dir+"-driver"
		library.Set("driver "+nvmltest.Version+" 12040",
			"gpu GPU-8f6d2e1a-73c1-4a0e-9d53-0c5b1f2a6d00 1b 81559 16896 ok NVIDIA H100 80GB HBM3",
			"gpu GPU-8f6d2e1a-73c1-4a0e-9d53-0c5b1f2a6d01 1c 81559 16896 ok NVIDIA H100 80GB HBM3")
		library.Driver(driver, 2)
		require.NoError(t, os.MkdirAll(filepath.Join(machine, "sys/module/nvidia"), 0o755))
		conf.Env = append(conf.Env, library.Env...)
		conf.ExtraArgs = append(conf.ExtraArgs, "--nvidia-driver-root", driver)
	}
	c.Agent = c.StartAgent(conf)
	c.nameImages()
	var err error
	c.Publisher, err = c.Tenant.NewPublisher(c.Ctx)
	require.NoError(t, err)
	c.Allocation, err = c.Tenant.Allocate(c.Ctx, c.Tenant.Admin, c.Agent.Ready.NodeID, nodeMillis/1000, 4096)
	require.NoError(t, err)
	return c
}

// nameImages makes the images and the names that they get when they are pushed.
func (c *corpus) nameImages() {
	c.T.Helper()
	image := serviceImage(c)
	c.images, c.refs = map[string]v1.Image{"app": image("/app"), "once": image("/app", "fetch")}, map[string]string{}
	for name, made := range c.images {
		digest, err := appkit.Digest(made)
		require.NoError(c.T, err)
		c.refs[name] = "org/acme/" + slug + "/" + name + "@" + digest
	}
}

// serviceImage makes images with one program under all its names.
func serviceImage(c *corpus) func(entrypoint ...string) v1.Image {
	c.T.Helper()
	binary := filepath.Join(c.Dir, "service")
	require.NoError(c.T, devcluster.Build(c.Ctx, harness.Source(c.T), program, binary))
	content, err := os.ReadFile(binary)
	require.NoError(c.T, err)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, dir := range []string{"bin/", "srv/"} {
		require.NoError(c.T, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}))
	}
	require.NoError(c.T, w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: "app", Mode: 0o755, Size: int64(len(content)),
	}))
	_, err = w.Write(content)
	require.NoError(c.T, err)
	for _, name := range []string{"api", "db", "bin/pg_isready", "bin/server", "bin/sh", "bin/tini"} {
		require.NoError(c.T, w.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: "app", Mode: 0o755}))
	}
	require.NoError(c.T, w.Close())
	require.NoError(c.T, os.WriteFile(filepath.Join(c.Dir, "service.tar"), archive.Bytes(), 0o600))
	require.NoError(c.T, appkit.CompressLayer(filepath.Join(c.Dir, "service.tar"), filepath.Join(c.Dir, "layer.tar.gz")))
	return func(entrypoint ...string) v1.Image {
		made, err := appkit.ImageFromLayer(filepath.Join(c.Dir, "layer.tar.gz"), appkit.ImageConfig{
			Entrypoint: entrypoint, Env: []string{"PATH=/bin"},
		})
		require.NoError(c.T, err)
		return made
	}
}

// converted is the file as a manifest whose services are small, with the number of its services.
func (c *corpus) converted(t *testing.T, version, file string) (doc []byte, services int64) {
	t.Helper()
	file = regexp.MustCompile(`org/acme/corpus/app@sha256:a{64}`).ReplaceAllString(file, c.refs["app"])
	images := map[string]string{}
	for _, match := range regexp.MustCompile(`image: (example/([a-z]+):[0-9]+)`).FindAllStringSubmatch(file, -1) {
		images[match[1]] = c.refs["app"]
		if match[2] == "fetch" {
			images[match[1]] = c.refs["once"]
		}
	}
	doc, err := compose.Convert(t.Context(), []byte(file), compose.Options{Slug: slug, Version: version, Images: images})
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, yaml.Unmarshal(doc, &m))
	profile := m["version"].(map[string]any)["runtime_profile"].(map[string]any)
	for _, s := range profile["services"].([]any) {
		services++
		s := s.(map[string]any)
		resources := s["resources"].(map[string]any)
		memory := serviceMiB
		if shm, has := resources["shm_mib"].(map[string]any); has {
			memory += shm["default"].(int)
		}
		shrink(resources["cpu_millis"], serviceMillis)
		shrink(resources["memory_mib"], memory)
		volumes, _ := s["volumes"].([]any)
		for _, v := range volumes {
			shrink(v.(map[string]any)["size_mib"], 16)
		}
	}
	doc, err = yaml.Marshal(m)
	require.NoError(t, err)
	return doc, services
}

// shrink makes a size the least and the default of a range.
func shrink(sizes any, size int) {
	r := sizes.(map[string]any)
	r["min"], r["default"] = size, size
	if most := r["max"].(int); most < size {
		r["max"] = size
	}
}

// ship makes the manifest a version, with the images that it names, and entitles the project to the first one.
func (c *corpus) ship(t *testing.T, version, doc string) {
	t.Helper()
	r := scenario.Release{AppSlug: slug, Version: version, Images: map[string]v1.Image{}}
	doc = strings.Replace(doc, "version: "+version, "version: ${version}", 1)
	for name, ref := range c.refs {
		if strings.Contains(doc, ref) {
			doc, r.Images[name] = strings.ReplaceAll(doc, ref, "${"+name+"_image}"), c.images[name]
		}
	}
	r.Template = []byte(doc)
	_, err := c.Tenant.Ship(c.Ctx, c.Publisher, r)
	require.NoError(t, err)
	c.entitle.Do(func() { err = c.Tenant.Entitle(c.Ctx, slug) })
	require.NoError(t, err)
}

// run publishes a file, launches it, checks it and decommissions it.
func (c *corpus) run(t *testing.T, name, file string, check func(a *app)) {
	t.Helper()
	version := "1.0." + strings.TrimLeft(name[:2], "0")
	doc, services := c.converted(t, version, file)
	c.ship(t, version, string(doc))
	in := client.AppInstanceCreate{AppSlug: slug, Version: version, DisplayName: name}
	own := *c.Testbed
	own.T = t
	if gpus := gpusOf(name); gpus.count > 0 {
		if gpus.vendor == "nvidia" {
			harness.NeedsNVML(t)
		}
		c.gpus.Lock()
		defer c.gpus.Unlock()
		c.ExplainUnconfirmed(1) // an exit that a busy machine's shim has not told in time counts as unseen
		allocation := own.AllocateGPUs(c.Agent.Ready.NodeID, gpus.model, gpus.count, 2048)
		defer func() {
			_, err := client.Read[client.Allocation](c.Admin().ReleaseAllocation(c.Ctx, c.Tenant.Project.ID, allocation.ID))
			require.NoError(t, err)
		}()
		in.PlacementIntent.AllocationIds = []string{allocation.ID}
		in.Resources.Accelerators = &gpus.count
	} else {
		require.NoError(t, c.room.Acquire(c.Ctx, services*serviceMillis))
		defer c.room.Release(services * serviceMillis)
		in.PlacementIntent.AllocationIds = []string{c.Allocation.ID}
	}
	i, took, err := c.Tenant.Launch(c.Ctx, c.Operator, in, nil)
	require.NoError(t, err)
	a := &app{Testbed: &own, i: own.Instance(i.ID)}
	if len(a.i.Members[0].Services) > 0 {
		require.Len(t, a.i.Members[0].Services, int(services))
	}
	a.containers = own.Running(i)
	check(a)
	own.Decommission(i)
	require.Zero(t, own.ContainersOn(c.Agent, i))
	t.Logf("ran after %s", took.Round(10*time.Millisecond))
}

// gpuNeed is what a file asks for.
type gpuNeed struct {
	vendor, model string
	count         int32
}

func gpusOf(name string) gpuNeed {
	return map[string]gpuNeed{
		"19-gpus-all":        {"nvidia", "NVIDIA H100 80GB HBM3", 1},
		"20-gpu-reservation": {"nvidia", "NVIDIA H100 80GB HBM3", 2},
		"21-amd":             {"amd", "AMD Radeon RX 7900", 1},
	}[name]
}
