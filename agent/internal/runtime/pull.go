package runtime

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteserrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// pullWatched pulls and unpacks, and leaves nothing behind of an image that takes too much of the disk.
func (u *unpacking) pullWatched(ctx context.Context, ref ImageRef, creds Credentials, tlsConf *tls.Config) error {
	if err := unix.Statfs(u.r.host.contentRoot, &u.before); err != nil {
		return fmt.Errorf("check free space: %w", err)
	}
	pulling, cancel := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { u.watch(pulling, cancel) })
	image, err := u.pull(pulling, ref, creds, tlsConf)
	cancel(nil)
	watching.Wait()
	if cause := context.Cause(pulling); err != nil && ctx.Err() == nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	if err != nil {
		return err
	}
	if err := u.checkSize(ctx); err != nil {
		return errors.Join(err, u.r.client.ImageService().Delete(ctx, image.Name()))
	}
	return nil
}

func (u *unpacking) pull(ctx context.Context, ref ImageRef, creds Credentials,
	tlsConf *tls.Config,
) (client.Image, error) {
	resolver, transport := newResolver(ctx, ref, creds, tlsConf)
	defer transport.CloseIdleConnections()
	var err error
	if u.fetcher, err = resolver.Fetcher(ctx, ref.name()); err != nil {
		return nil, err
	}
	return u.r.client.Pull(ctx, ref.RegistryHost+"/"+ref.name(), client.WithResolver(resolver),
		client.WithImageHandlerWrapper(func(next images.Handler) images.Handler {
			return u.streamLayers(u.sizeGuard(next))
		}))
}

// sizeGuard checks the sizes that a manifest declares before any layer is fetched. The sizes are binding: a layer
// that is longer or shorter fails its digest. All but layers is read into memory.
func (u *unpacking) sizeGuard(next images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if !images.IsLayerType(desc.MediaType) && desc.Size > maxDocumentBytes {
			return nil, errImageTooLarge
		}
		children, err := next.Handle(ctx, desc)
		for i := range children {
			children[i].URLs = nil // the node asks no host but the registry
		}
		if err != nil || !images.IsManifestType(desc.MediaType) {
			return children, err
		}
		if len(children) > maxLayers {
			return nil, errImageTooLarge
		}
		var total int64
		for _, c := range children {
			if c.Size < 0 || c.Size > u.r.cfg.MaxImageBytes {
				return nil, errImageTooLarge
			}
			total += c.Size
		}
		if total > u.r.cfg.MaxImageBytes {
			return nil, errImageTooLarge
		}
		u.compressed.Store(total)
		return children, nil
	})
}

// hostless lets the image be stored under a name without the registry's host.
type hostless struct {
	remotes.Resolver
	host, name string
}

func (h hostless) Resolve(ctx context.Context, ref string) (string, ocispec.Descriptor, error) {
	_, desc, err := h.Resolver.Resolve(ctx, ref)
	if errdefs.IsNotFound(err) {
		// The resolver reports the last of several answers, and the first one may have come from a registry that was just
		// starting.
		if _, desc, err = h.Resolver.Resolve(ctx, ref); errdefs.IsNotFound(err) {
			err = fmt.Errorf("%w: %w", errNotInRegistry, err)
		}
	}
	return h.name, desc, err
}

func (h hostless) Fetcher(ctx context.Context, name string) (remotes.Fetcher, error) {
	return h.Resolver.Fetcher(ctx, h.host+"/"+name)
}

func newResolver(ctx context.Context, ref ImageRef, creds Credentials,
	tlsConf *tls.Config,
) (remotes.Resolver, *http.Transport) {
	// HTTP/1.1 gives each layer a connection of its own. HTTP/2's frames cost hub and node half as much processor time
	// again for each byte.
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	transport := &http.Transport{
		Protocols:             &protocols,
		TLSClientConfig:       tlsConf,
		TLSHandshakeTimeout:   pullDialTimeout,
		ResponseHeaderTimeout: pullHeaderTimeout,
		IdleConnTimeout:       pullHeaderTimeout,
		MaxIdleConnsPerHost:   parallelLayers,
		Proxy:                 http.ProxyFromEnvironment,
	}
	web := &http.Client{Transport: transport, CheckRedirect: onlyHTTPS}
	authorizer := docker.NewDockerAuthorizer(docker.WithAuthClient(web),
		docker.WithAuthCreds(func(string) (string, string, error) {
			if creds == nil {
				return "", "", nil
			}
			return creds(ctx, ref.Repository)
		}))
	hosts := func(host string) ([]docker.RegistryHost, error) {
		return []docker.RegistryHost{{
			Client: web, Authorizer: authorizer, Host: host, Scheme: "https", Path: "/v2",
			Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
		}}, nil
	}
	return hostless{
		Resolver: docker.NewResolver(docker.ResolverOptions{Hosts: hosts}), host: ref.RegistryHost,
		name: ref.name(),
	}, transport
}

func onlyHTTPS(req *http.Request, via []*http.Request) error {
	if req.URL.Scheme != "https" || len(via) > maxRedirects {
		return errors.New("the registry redirects too often or to plain HTTP")
	}
	return nil
}

// pullFault says what went wrong with an image. Wrong content, a missing manifest and a refusal are final; all else may
// pass.
func pullFault(ref ImageRef, err error) error {
	if _, known := errors.AsType[*fault.Error](err); known {
		return err
	}
	say := func(kind fault.Kind, code fault.Code, public string) *fault.Error {
		return fault.New(kind, code, fmt.Sprintf("The image %s %s", ref.name(), public), err)
	}
	var status remoteserrors.ErrUnexpectedStatus
	switch text := err.Error(); {
	case errors.Is(err, errImageTooLarge):
		return say(fault.TooLarge, codeImagePullFailed, "is larger than this node allows.").Permanent()
	case SpaceMissing(err) > 0, errors.Is(err, unix.ENOSPC), strings.Contains(text, "no space left on device"):
		return say(fault.Unavailable, codeImagePullFailed, "does not fit on this node's disk: free space where containerd "+
			"keeps its data.")
	case errors.Is(err, errBadImage):
		return say(fault.Unprocessable, codeImagePullFailed, "is not a container image.").Permanent()
	case errors.Is(err, errWrongContent),
		strings.Contains(text, "unexpected commit digest"), strings.Contains(text, "failed size validation"),
		strings.Contains(text, "unexpected commit size"):
		return say(fault.Unprocessable, codeImageDigestMismatch, "is not what its digest says.").Permanent()
	case errors.As(err, &status) && status.StatusCode == http.StatusForbidden:
		return say(fault.Forbidden, codeImagePullFailed, "may not be pulled: the registry refuses.").Permanent()
	case errors.Is(err, docker.ErrInvalidAuthorization), errors.As(err, &status) &&
		status.StatusCode == http.StatusUnauthorized:
		// The node's credentials are renewed from time to time.
		return say(fault.Unavailable, codeImagePullFailed, "may not be pulled with this node's credentials.")
	case strings.Contains(text, "no match for platform"):
		return say(fault.Unprocessable, codeImagePullFailed, "has nothing for this machine's platform, "+
			platforms.DefaultString()+".").Permanent()
	case errors.Is(err, errNotInRegistry):
		return say(fault.NotFound, codeImagePullFailed, "is not in the registry.").Permanent()
	case errdefs.IsNotFound(err):
		return say(fault.NotFound, codeImagePullFailed, "could not be pulled whole.")
	}
	return say(fault.Unavailable, codeImagePullFailed, "could not be pulled.")
}
