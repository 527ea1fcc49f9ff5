package appkit

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/imagesign"
	"github.com/gpuaas/gpuaas/protocol"
)

// Target is where to push, as a publish intent says it.
type Target struct {
	// RegistryHost is host:port.
	RegistryHost       string
	Repository, Tag    string
	Username, Password string
	// CAFile holds the authority of the registry's certificate; empty means the system's.
	CAFile string
	// CAPEM is the same as text; it counts where CAFile is empty.
	CAPEM []byte
}

// Pushed is what to register.
type Pushed struct {
	Repository string
	// Digest is sha256:<hex>.
	Digest    string
	MediaType string
}

// Push uploads an image and its signature (cosign's .sig tag). progress, which may be nil, hears how many bytes of how
// many are there. Pushing the same image again uploads nothing.
func Push(ctx context.Context, img v1.Image, t Target, signer protocol.Signer,
	progress func(done, total int64),
) (Pushed, error) {
	repo, err := name.NewRepository(t.RegistryHost + "/" + t.Repository)
	if err != nil {
		return Pushed{}, fault.New(fault.Malformed, fault.CodeRepositoryMalformed, "The repository name cannot be used.",
			err).Permanent()
	}
	base, err := httpsOnly(t.CAFile, t.CAPEM)
	if err != nil {
		return Pushed{}, err
	}
	defer base.CloseIdleConnections()
	options := []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(base),
		remote.WithAuth(&authn.Basic{Username: t.Username, Password: t.Password}),
	}
	digest, err := Digest(img)
	if err != nil {
		return Pushed{}, err
	}
	mediaType, err := img.MediaType()
	if err != nil {
		return Pushed{}, fmt.Errorf("image: %w", err)
	}
	signature, err := SignatureImage(t.Repository, digest, signer)
	if err != nil {
		return Pushed{}, err
	}
	if err := writeImage(repo.Tag(t.Tag), img, options, progress); err != nil {
		return Pushed{}, err
	}
	// The signature comes last: it never signs an image that is not stored.
	if err := writeImage(repo.Tag(imagesign.Tag(digest)), signature, options, nil); err != nil {
		return Pushed{}, err
	}
	return Pushed{Repository: t.Repository, Digest: digest, MediaType: string(mediaType)}, nil
}

func writeImage(tag name.Tag, img v1.Image, options []remote.Option, progress func(done, total int64)) error {
	var updates chan v1.Update
	progressDone := make(chan struct{})
	if progress != nil {
		updates = make(chan v1.Update, 64)
		options = append(append([]remote.Option(nil), options...), remote.WithProgress(updates))
		go func() {
			defer close(progressDone)
			for u := range updates {
				if u.Error == nil {
					progress(u.Complete, u.Total)
				}
			}
		}()
	} else {
		close(progressDone)
	}
	err := remote.Write(tag, img, options...)
	// remote.Write closes the channel of WithProgress when it returns.
	<-progressDone
	if err == nil {
		return nil
	}
	if answer, ok := errors.AsType[*transport.Error](err); ok {
		switch {
		case answer.StatusCode == http.StatusForbidden && strings.Contains(err.Error(), "quota_exceeded"):
			return fault.New(fault.Conflict, fault.CodeQuotaExceeded, "The org may store no more in the registry; ask a "+
				"platform "+
				"admin to raise its quota.", err).Permanent()
		case answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden:
			return fault.New(fault.Forbidden, codePushRefused, "The registry refuses the push; ask for a new publish intent.",
				err).Permanent()
		case answer.StatusCode >= http.StatusInternalServerError:
			return fault.New(fault.Unavailable, codePushNotStored, "The registry could not store the image; its disk may be "+
				"full, the hub's log says more.", err)
		}
	}
	return fault.New(fault.Unavailable, codePushFailed, "The image could not be pushed; check the registry's address and "+
		"the CA file.", err)
}

// SignatureImage makes what lies under the .sig tag.
func SignatureImage(repository, digest string, signer protocol.Signer) (v1.Image, error) {
	payload, err := imagesign.Payload(repository, digest)
	if err != nil {
		return nil, err
	}
	sig, err := signer.Sign(payload)
	if err != nil {
		return nil, fmt.Errorf("sign the image: %w", err)
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.Append(img, mutate.Addendum{
		Layer:       static.NewLayer(payload, imagesign.MediaTypePayload),
		MediaType:   imagesign.MediaTypePayload,
		Annotations: map[string]string{imagesign.AnnotationSignature: base64.StdEncoding.EncodeToString(sig)},
	})
	if err != nil {
		return nil, fmt.Errorf("signature image: %w", err)
	}
	return img, nil
}

// transportOf refuses plain HTTP: when TLS fails, the registry client would try it on private addresses and send the
// password in clear text.
type transportOf struct{ *http.Transport }

// RoundTrip is part of http.RoundTripper.
func (t transportOf) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" {
		return nil, errors.New("the registry must be called by HTTPS")
	}
	return t.Transport.RoundTrip(r)
}

func httpsOnly(caFile string, text []byte) (transportOf, error) {
	base, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		return transportOf{}, errors.New("the default transport was replaced")
	}
	out := base.Clone()
	out.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	var err error
	if caFile != "" {
		text, err = os.ReadFile(caFile)
	}
	if caFile != "" || len(text) > 0 {
		pool := x509.NewCertPool()
		if err != nil || !pool.AppendCertsFromPEM(text) {
			return transportOf{}, fault.New(fault.Unprocessable, codeCAUnreadable, "The CA file holds no certificate: "+caFile,
				err).Permanent()
		}
		out.TLSClientConfig.RootCAs = pool
	}
	return transportOf{out}, nil
}
