package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// flags are those of `vllm serve` that the stand-in heeds.
type flags struct {
	model            string
	servedNames      []string
	host             string
	port             int
	apiKeys          []string
	maxModelLen      int
	tensorParallel   int
	pipelineParallel int
}

// usageError is a command line that vLLM would refuse with exit code 2.
type usageError string

func (e usageError) Error() string { return string(e) }

// Defaults as documented. A model's own length is not known here; maxModelLen stands for one of 4,096 tokens.
const (
	defaultPort        = 8000
	defaultMaxModelLen = 4096
)

// ignoredFlags are documented flags whose effect needs a GPU or a model. Their values are checked for their form alone.
func ignoredFlags(set *pflag.FlagSet) {
	set.Float64("gpu-memory-utilization", 0.9, "")
	set.String("dtype", "auto", "")
	set.String("quantization", "", "")
	set.String("tokenizer", "", "")
	set.String("revision", "", "")
	set.String("download-dir", "", "")
	set.String("load-format", "auto", "")
	set.String("kv-cache-dtype", "auto", "")
	set.String("chat-template", "", "")
	set.String("uvicorn-log-level", "info", "")
	set.Int("max-num-seqs", 256, "")
	set.Int("max-num-batched-tokens", 0, "")
	set.Int("seed", 0, "")
	set.Float64("swap-space", 4, "")
	set.Bool("trust-remote-code", false, "")
	set.Bool("enforce-eager", false, "")
	set.Bool("enable-prefix-caching", false, "")
	set.Bool("enable-auto-tool-choice", false, "")
	set.String("tool-call-parser", "", "")
	set.Bool("disable-log-requests", false, "")
	set.Bool("disable-log-stats", false, "")
}

// parseFlags reads `serve MODEL [flags]`, or the flags alone as vLLM's image takes them. A configuration file comes
// before the command line, which stands above it.
func parseFlags(args []string, getenv func(string) string) (flags, error) {
	if len(args) > 0 && args[0] == "serve" {
		args = args[1:]
	}
	var f flags
	set := pflag.NewFlagSet("vllm serve", pflag.ContinueOnError)
	set.SetOutput(os.Stderr)
	set.StringVar(&f.model, "model", "", "")
	set.StringSliceVar(&f.servedNames, "served-model-name", nil, "")
	set.StringVar(&f.host, "host", "", "")
	set.IntVar(&f.port, "port", defaultPort, "")
	set.StringSliceVar(&f.apiKeys, "api-key", nil, "")
	set.IntVar(&f.maxModelLen, "max-model-len", defaultMaxModelLen, "")
	set.IntVar(&f.tensorParallel, "tensor-parallel-size", 1, "")
	set.IntVar(&f.pipelineParallel, "pipeline-parallel-size", 1, "")
	config := set.String("config", "", "")
	ignoredFlags(set)
	if err := set.Parse(args); err != nil {
		return flags{}, usageError(err.Error())
	}
	if *config != "" {
		if err := applyConfig(set, *config); err != nil {
			return flags{}, err
		}
	}
	if set.NArg() > 1 {
		return flags{}, usageError("unrecognized arguments: " + strings.Join(set.Args()[1:], " "))
	}
	if set.NArg() == 1 {
		f.model = set.Arg(0)
	}
	if len(f.servedNames) == 0 {
		f.servedNames = []string{f.model}
	}
	if key := getenv("VLLM_API_KEY"); len(f.apiKeys) == 0 && key != "" {
		f.apiKeys = []string{key}
	}
	return f, f.check(set)
}

func (f flags) check(set *pflag.FlagSet) error {
	utilization, err := set.GetFloat64("gpu-memory-utilization")
	if err != nil {
		return err
	}
	dtype, err := set.GetString("dtype")
	if err != nil {
		return err
	}
	switch {
	case f.model == "":
		return usageError("the model is missing")
	case f.port < 1 || f.port > 65535:
		return usageError("argument --port: no port")
	case f.maxModelLen < 1:
		return usageError("argument --max-model-len: must be positive")
	case f.tensorParallel < 1 || f.pipelineParallel < 1:
		return usageError("argument --tensor-parallel-size: must be positive")
	case utilization <= 0 || utilization > 1:
		return usageError("argument --gpu-memory-utilization: must be in (0, 1]")
	case !slices.Contains([]string{"auto", "bfloat16", "float", "float16", "float32", "half"}, dtype):
		return usageError("argument --dtype: invalid choice: " + dtype)
	}
	return nil
}

// applyConfig sets the flags of a YAML file, key by key, that the command line leaves open.
func applyConfig(set *pflag.FlagSet, path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return usageError("argument --config: " + err.Error())
	}
	var values map[string]any
	if err := yaml.Unmarshal(data, &values); err != nil {
		return usageError("argument --config: " + err.Error())
	}
	for key, value := range values {
		name := strings.ReplaceAll(key, "_", "-")
		if set.Changed(name) {
			continue
		}
		if err := set.Set(name, fmt.Sprint(value)); err != nil {
			return usageError("argument --config: " + err.Error())
		}
	}
	return nil
}

// visibleGPUs counts the device nodes of GPUs: NVIDIA's, or else AMD's render nodes.
func visibleGPUs(dev string) (int, error) {
	nvidia, err := filepath.Glob(filepath.Join(dev, "nvidia*"))
	if err != nil {
		return 0, err
	}
	number := regexp.MustCompile(`/nvidia\d+$`)
	if n := len(slices.DeleteFunc(nvidia, func(p string) bool { return !number.MatchString(p) })); n > 0 {
		return n, nil
	}
	amd, err := filepath.Glob(filepath.Join(dev, "dri", "renderD*"))
	return len(amd), err
}
